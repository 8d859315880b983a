"""Prompts -> the verifier's own responses, as token ids with what is supervised."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle3.prompts import read_prompts
from eagle3.regenerate import RegenerateSettings, regenerate
from eagle3.verifier import VerifierSpec
from eagle3.workspace import digest_file, publish
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of <split>.jsonl")
    parser.add_argument("--section", default="regenerate", help="section of params.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of <split>.jsonl")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(RegenerateSettings, args.section)
    spec = VerifierSpec.open(args.verifier, trust_remote_code=stage.run.trust_remote_code)
    files = {split: args.prompts / f"{split}.jsonl" for split in settings.splits}
    prompts = {str(split): read_prompts(path) for split, path in files.items()}
    key = {
        "settings": settings.model_dump(),
        "verifier": [spec.verifier, spec.revision],
        "prompts": {split: digest_file(path) for split, path in files.items()},
        "run": stage.run.model_dump(),
    }
    with stage.work(key) as work:
        facts = regenerate(
            spec,
            prompts,
            settings,
            seed=stage.run.seed,
            device=stage.run.device,
            work=work,
            out=work / "responses",
        )
        for name, value in facts.items():
            stage.note(name, value)
        publish(work / "responses", args.out)


if __name__ == "__main__":
    run_stage("regenerate", main, add_arguments)
