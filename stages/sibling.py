"""Verifier -> sibling: linear layers rounded to a few bits, and its head file."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle3.sibling import SiblingSettings, make_sibling
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import write_head
from eagle3.workspace import publish
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the sibling")
    parser.add_argument("--head", type=Path, required=True, help="head file, safetensors")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(SiblingSettings, "sibling")
    spec = VerifierSpec.open(args.verifier)
    key = {**settings.model_dump(), "verifier": spec.verifier, "revision": spec.revision}
    with stage.work(key) as work:
        stage.note("sibling", make_sibling(spec, settings, work / "sibling"))
        sibling = VerifierSpec.open(work / "sibling")
        write_head(sibling, work / "head.safetensors")
        publish(work / "sibling", args.out)
        publish(work / "head.safetensors", args.head)


if __name__ == "__main__":
    run_stage("sibling", main, add_arguments)
