"""Hidden states -> a verdict on whether they are what serving will see; a mismatch stops here."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from eagle3.contract import (
    NOT_CHECKED,
    SERVERS,
    ParitySettings,
    check_splits,
    longest_document,
    open_engine,
)
from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head
from eagle3.workspace import write_json
from stages.runner import Stage, run_stage

# Test states come from the same extraction; were they here, new test prompts would train again.
TRAINED_ON = ("train", "dev")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def several(name: str, text: str) -> None:
        parser.add_argument(name, type=Path, nargs="+", required=True, help=text)

    several("--states", "folders of <split>/, one for each verifier")
    several("--verifiers", "folders, in the order of the states")
    several("--heads", "verifier heads, in the same order")
    parser.add_argument("--out", type=Path, required=True, help="the verdict, JSON")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(ParitySettings, "parity")
    if not len(args.states) == len(args.verifiers) == len(args.heads):
        raise HarnessError(
            "folders of states and verifiers do not pair up",
            where="--states, --verifiers, --heads",
            rule="as many of each",
            got=[len(args.states), len(args.verifiers), len(args.heads)],
            fix="correct the stage's command in dvc.yaml",
        )
    found = {}
    for states, verifier, head in zip(args.states, args.verifiers, args.heads, strict=True):
        with contextlib.ExitStack() as stack:
            engine = None
            if settings.engine is not None:
                spec = VerifierSpec.open(
                    str(verifier), trust_remote_code=stage.run.trust_remote_code
                )
                engine = stack.enter_context(
                    open_engine(
                        settings.engine,
                        spec,
                        settings,
                        stage.run.device,
                        longest=longest_document(states),
                    )
                )
            found[str(states)] = check_splits(
                states, read_head(head), settings, engine, names=TRAINED_ON
            )
    served = settings.engine in SERVERS
    words = f"checked against {settings.engine}" if served else NOT_CHECKED
    stage.note("parity", words)
    write_json(args.out, {"words": words, "engine": settings.engine, "states": found})


if __name__ == "__main__":
    run_stage("parity", main, add_arguments)
