"""How fast extraction is beside the bare forward pass: same batches, turn about, one process.

`python -m experiments.benchmarks.extraction --verifier data/verifier --responses data/responses`
prints JSON. The bare pass is the causal LM's own forward, lm_head included, with nothing kept.
Beside wall time stands this process's CPU time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from eagle3.dataset import StatesMeta
from eagle3.extraction.base import ExtractSettings, choose_layers
from eagle3.extraction.run import extract, plan_batches
from eagle3.extraction.transformers import TransformersEngine
from eagle3.responses import Response, read_splits
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model
from eagle3.workspace import write_json
from experiments.evidence import KEY, of_benchmark


@dataclass
class Clock:
    """Wall and CPU seconds of each measured block, in order."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        wall, cpu = perf_counter(), process_time()
        yield
        self.wall.append(perf_counter() - wall)
        self.cpu.append(process_time() - cpu)


def run_bare(model: torch.nn.Module, responses: list[Response], batch_tokens: int) -> None:
    """The forward passes over all responses, batched as extraction batches them."""
    tokens = [response.tokens().long() for response in responses]
    device = next(model.parameters()).device
    with torch.inference_mode():
        for batch in plan_batches([len(one) for one in tokens], batch_tokens):
            padded = torch.nn.utils.rnn.pad_sequence([tokens[i] for i in batch], batch_first=True)
            model(input_ids=padded.to(device), use_cache=False).logits[0, 0, 0].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--responses", type=Path, required=True, help="folder of <split>.jsonl")
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="file for the result, beside printing it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = VerifierSpec.open(args.verifier)
    settings = ExtractSettings(batch_tokens=args.batch_tokens)
    layers = choose_layers(None, spec.num_hidden_layers, where="extract")
    responses = read_splits(args.responses, vocab_size=spec.vocab_size)["train"][: args.documents]
    model = load_model(spec, torch.bfloat16, args.device)
    # Another copy: hooks must not slow the bare pass.
    engine = TransformersEngine.open(spec, layers, torch.bfloat16, args.device)
    meta = StatesMeta(
        verifier=spec.verifier, config_hash=spec.config_hash, engine="transformers",
        engine_version=engine.identity.version, aux_layers=layers, final_hidden="post_norm",
        dtype="bfloat16", hidden_size=spec.hidden_size, vocab_size=spec.vocab_size,
    )  # fmt: skip
    tokens = sum(len(response.token_ids) for response in responses)
    bare, ours = Clock(), Clock()
    for round_number in range(args.rounds + 1):
        with bare.measure():
            run_bare(model, responses, settings.batch_tokens)
        with tempfile.TemporaryDirectory() as folder, ours.measure():
            extract(engine, responses, Path(folder), meta=meta, settings=settings)
        if round_number == 0:  # warms up
            bare, ours = Clock(), Clock()
    result: dict[str, Any] = {
        "verifier": spec.verifier,
        "tokens": tokens,
        "threads": args.threads,
        "bare_tokens_per_s": round(tokens / statistics.median(bare.wall), 1),
        "extract_tokens_per_s": round(tokens / statistics.median(ours.wall), 1),
        "speed_of_bare_wall": _ratios(bare.wall, ours.wall),
        "speed_of_bare_cpu": _ratios(bare.cpu, ours.cpu),
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        result[KEY] = of_benchmark(__file__, args, threads=args.threads)
        write_json(args.out, result)


def _ratios(bare: list[float], ours: list[float]) -> dict[str, object]:
    ratios = [one / other for one, other in zip(bare, ours, strict=True)]
    return {"median": round(statistics.median(ratios), 3), "rounds": [round(r, 3) for r in ratios]}


if __name__ == "__main__":
    main()
