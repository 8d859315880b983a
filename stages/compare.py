"""Counts and speeds of all arms -> which one accepts more, how surely, and whether it pays."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eagle3.acceptance import read_counts
from eagle3.comparison import CompareSettings, compare
from eagle3.workspace import write_json
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help="counts by prompt: ARM.jsonl ..."
    )
    parser.add_argument(
        "--timings", type=Path, nargs="*", default=[], help="speeds: ARM.timing.json ..."
    )
    parser.add_argument("--out", type=Path, required=True)


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(CompareSettings, "compare")
    runs = {path.stem: [read_counts(path)] for path in args.prompts}
    timings = {path.name.split(".")[0]: json.loads(path.read_text()) for path in args.timings}
    result = compare(runs, timings, settings)
    write_json(args.out, result)
    stage.note("verdict", result["comparison"]["verdict"])


if __name__ == "__main__":
    run_stage("compare", main, add_arguments)
