"""What all stages wrote -> the report, and the numbers that are kept beside the code."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle3.report.data import read_data
from eagle3.report.page import ReportSettings, render
from eagle3.report.summary import summary
from eagle3.workspace import write_atomically, write_json
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def several(name: str, text: str) -> None:
        parser.add_argument(name, type=Path, nargs="*", default=[], help=text)

    parser.add_argument("--comparison", type=Path, help="what the compare stage wrote")
    several("--summaries", "counts: ARM.json ...")
    several("--timings", "speeds: ARM.timing.json ...")
    several("--curves", "training curves: ARM.curve.jsonl ...")
    parser.add_argument("--coverage", type=Path, help="of the draft vocabulary")
    parser.add_argument("--parity", type=Path, help="verdict on the hidden states")
    parser.add_argument("--mistakes", type=Path, help="τ under wrong conventions")
    several("--stages", "provenance: STAGE.json ...")
    for name in ("--study", "--calibration", "--crossover"):
        parser.add_argument(name, type=Path, help="what `eagle3 study` found, where it has run")
    parser.add_argument("--out", type=Path, required=True, help="HTML")
    parser.add_argument("--metrics", type=Path, required=True, help="the summary, JSON")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(ReportSettings, "report")
    data = read_data(
        comparison=args.comparison,
        summaries=args.summaries,
        timings=args.timings,
        curves=args.curves,
        coverage=args.coverage,
        parity=args.parity,
        mistakes=args.mistakes,
        provenance=args.stages,
        study=args.study,
        calibration=args.calibration,
        crossover=args.crossover,
    )
    write_atomically(args.out, render(data, settings))
    write_json(args.metrics, summary(data))


if __name__ == "__main__":
    run_stage("report", main, add_arguments)
