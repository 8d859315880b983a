"""Responses and the verifier that wrote them -> hidden states, a dataset folder for each split."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from eagle3.dataset import StatesMeta
from eagle3.extraction.backends import batches_ahead, open_engine
from eagle3.extraction.base import ExtractSettings, choose_layers
from eagle3.extraction.run import extract
from eagle3.responses import read_splits
from eagle3.verifier import VerifierSpec
from eagle3.workspace import digest_file, publish
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--responses", type=Path, required=True, help="folder of <split>.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for <split>/")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(ExtractSettings, "extract")
    spec = VerifierSpec.open(args.verifier, trust_remote_code=stage.run.trust_remote_code)
    layers = choose_layers(settings.aux_layers, spec.num_hidden_layers, where="extract")
    splits = read_splits(
        args.responses, vocab_size=spec.vocab_size, max_length=spec.max_position_embeddings
    )
    key = {
        "settings": settings.model_dump(mode="json", exclude={"server"}),
        "verifier": [spec.config_hash, spec.revision],
        "responses": {name: digest_file(args.responses / f"{name}.jsonl") for name in splits},
        "torch": torch.__version__,
        "run": stage.run.model_dump(),
    }
    longest = max(len(one.token_ids) for responses in splits.values() for one in responses)
    with stage.work(key) as work:
        with open_engine(
            settings, spec, layers, device=stage.run.device, longest=longest, work=work
        ) as engine:
            meta = StatesMeta(
                verifier=spec.verifier,
                config_hash=spec.config_hash,
                revision=spec.revision,
                engine=engine.identity.engine,
                engine_version=engine.identity.version,
                aux_layers=layers,
                final_hidden=engine.identity.final_hidden,
                dtype=settings.dtype,
                codec=settings.codec,
                hidden_size=spec.hidden_size,
                vocab_size=spec.vocab_size,
            )
            for name, responses in splits.items():
                done = extract(
                    engine,
                    responses,
                    work / "states" / name,
                    meta=meta,
                    settings=settings,
                    label=name,
                    ahead=batches_ahead(settings),
                )
                stage.note(name, {"tokens": done.tokens, "seconds": round(done.seconds, 3)})
        publish(work / "states", args.out)


if __name__ == "__main__":
    run_stage("extract", main, add_arguments)
