"""Responses -> draft vocabulary from the training split, and its coverage of every split."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle3.errors import HarnessError
from eagle3.responses import Response, read_splits
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_tokenizer
from eagle3.vocab import (
    DraftVocabulary,
    VocabSettings,
    build_vocabulary,
    count_supervised,
    write_vocabulary,
)
from eagle3.workspace import write_json
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--responses", type=Path, required=True, help="folder of <split>.jsonl")
    parser.add_argument("--section", default="vocab", help="section of params.yaml")
    parser.add_argument("--out", type=Path, required=True, help="vocabulary, safetensors")
    parser.add_argument("--metrics", type=Path, required=True, help="coverage, JSON")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(VocabSettings, args.section)
    spec = VerifierSpec.open(args.verifier, trust_remote_code=stage.run.trust_remote_code)
    splits = read_splits(args.responses, vocab_size=spec.vocab_size)
    if "train" not in splits:
        raise HarnessError(
            "no training responses",
            where=args.responses,
            rule="train.jsonl",
            got=f"splits {', '.join(splits)}",
            fix="run the regenerate stage",
        )
    size = spec.vocab_size if settings.size is None else settings.size
    special = {*spec.eos_token_ids, *load_tokenizer(spec).all_special_ids}
    vocabulary = build_vocabulary(count_supervised(splits["train"], spec.vocab_size), size, special)
    coverage = {
        name: _coverage(vocabulary, responses, spec.vocab_size)
        for name, responses in splits.items()
    }
    write_vocabulary(
        vocabulary,
        args.out,
        metadata={
            "verifier": spec.verifier,
            "config_hash": spec.config_hash,
            "coverage": {name: values["coverage"] for name, values in coverage.items()},
        },
    )
    write_json(args.metrics, {"size": size, "splits": coverage})


def _coverage(
    vocabulary: DraftVocabulary, responses: list[Response], vocab_size: int
) -> dict[str, object]:
    """Share of supervised tokens that can be drafted, in all and by source."""
    counts = count_supervised(responses, vocab_size)
    by_source: dict[str, list[Response]] = {}
    for response in responses:
        by_source.setdefault(response.source, []).append(response)
    return {
        "supervised": int(counts.sum()),
        "coverage": vocabulary.coverage(counts),
        "sources": {
            source: vocabulary.coverage(count_supervised(some, vocab_size))
            for source, some in sorted(by_source.items())
        },
    }


if __name__ == "__main__":
    run_stage("vocab", main, add_arguments)
