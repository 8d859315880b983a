"""How fast extraction is beside the bare forward pass: same batches, turn about, one process.

`python -m experiments.benchmarks.extraction --verifier data/verifier --responses data/responses`
prints JSON. The bare pass is the causal LM's own forward, lm_head included, with nothing kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch

from eagle3.dataset import StatesMeta
from eagle3.extraction.base import ExtractSettings, choose_layers
from eagle3.extraction.run import extract, plan_batches
from eagle3.extraction.transformers import TransformersEngine
from eagle3.responses import Response, read_splits
from eagle3.verifier import VerifierSpec, decoder_of, load_model


def bare_seconds(model: torch.nn.Module, responses: list[Response], batch_tokens: int) -> float:
    """Seconds of the forward passes over all responses, batched as extraction batches them."""
    tokens = [response.tokens().long() for response in responses]
    device = next(model.parameters()).device
    started = perf_counter()
    with torch.inference_mode():
        for batch in plan_batches([len(one) for one in tokens], batch_tokens):
            padded = torch.nn.utils.rnn.pad_sequence([tokens[i] for i in batch], batch_first=True)
            model(input_ids=padded.to(device), use_cache=False).logits[0, 0, 0].item()
    return perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--responses", type=Path, required=True, help="folder of <split>.jsonl")
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = VerifierSpec.open(args.verifier)
    settings = ExtractSettings(batch_tokens=args.batch_tokens)
    layers = choose_layers(None, spec.num_hidden_layers, where="extract")
    responses = read_splits(args.responses, vocab_size=spec.vocab_size)["train"][: args.documents]
    model = load_model(spec, torch.bfloat16, args.device)
    hooked = load_model(spec, torch.bfloat16, args.device)  # hooks must not slow the bare pass
    engine = TransformersEngine(
        hooked, decoder_of(hooked), layers,
        logit_scale=spec.logit_scale, logit_softcap=spec.logit_softcap,
    )  # fmt: skip
    meta = StatesMeta(
        verifier=spec.verifier, config_hash=spec.config_hash, engine="transformers",
        engine_version=engine.identity.version, aux_layers=layers, final_hidden="post_norm",
        dtype="bfloat16", hidden_size=spec.hidden_size, vocab_size=spec.vocab_size,
    )  # fmt: skip
    tokens = sum(len(response.token_ids) for response in responses)
    bare, ours = [], []
    for _ in range(args.rounds + 1):
        bare.append(bare_seconds(model, responses, settings.batch_tokens))
        with tempfile.TemporaryDirectory() as folder:
            started = perf_counter()
            extract(engine, responses, Path(folder), meta=meta, settings=settings)
            ours.append(perf_counter() - started)
    bare, ours = bare[1:], ours[1:]  # the first round warms up
    ratios = [one / other for one, other in zip(bare, ours, strict=True)]
    result = {
        "tokens": tokens,
        "threads": args.threads,
        "bare_tokens_per_s": round(tokens / statistics.median(bare), 1),
        "extract_tokens_per_s": round(tokens / statistics.median(ours), 1),
        "speed_of_bare": round(statistics.median(ratios), 3),
        "speed_of_bare_each_round": [round(ratio, 3) for ratio in ratios],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
