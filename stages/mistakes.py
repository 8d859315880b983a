"""A drafter under every convention that gets mixed up -> what each silent mistake costs."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from eagle3.checkpoint import load_drafter
from eagle3.dataset import StatesDataset
from eagle3.extraction.transformers import TransformersEngine
from eagle3.mistakes import MistakesSettings, table
from eagle3.reference import head_norm, reference_layers
from eagle3.served_as import replayable, with_layers
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head
from eagle3.workspace import write_json
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", required=True, help="name of the drafter in the report")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--verifier", required=True, help="folder or hub id")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--states", type=Path, required=True, help="states of dev prompts")
    parser.add_argument("--out", type=Path, required=True, help="the table, JSON")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(MistakesSettings, "mistakes")
    spec = VerifierSpec.open(args.verifier, trust_remote_code=stage.run.trust_remote_code)
    head = read_head(args.head)
    states = StatesDataset.open(args.states)
    states.check(head.config)
    documents = replayable(states, settings.documents, where=args.states)
    dtype = getattr(torch, settings.dtype)
    drafter = load_drafter(args.checkpoint, head, dtype).eval().requires_grad_(False)
    engine = TransformersEngine.open(
        spec, reference_layers(spec.num_hidden_layers), dtype, stage.run.device
    )
    layered = with_layers(documents, engine, head)
    write_json(
        args.out,
        {
            "arm": args.arm,
            "k": settings.k,
            "documents": len(documents),
            "tokens": sum(len(document.token_ids) for document in documents),
            "rows": table(drafter, layered, head, head_norm(head), settings),
        },
    )


if __name__ == "__main__":
    run_stage("mistakes", main, add_arguments)
