"""A checkpoint -> the folder that serving engines load."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle3.export import ExportSettings, export
from eagle3.verifier_head import read_head
from eagle3.workspace import digest_file, publish
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True, help="verifier head it is served with")
    parser.add_argument("--out", type=Path, required=True)


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(ExportSettings, "export")
    head = read_head(args.head)
    key = {
        "checkpoint": digest_file(args.checkpoint / "model.safetensors"),
        "settings": settings.model_dump(),
    }
    with stage.work(key) as work:
        error = export(args.checkpoint, work / "export", head, settings.format)
        stage.note("largest relative logit difference", error)
        publish(work / "export", args.out)


if __name__ == "__main__":
    run_stage("export", main, add_arguments)
