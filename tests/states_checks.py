"""Documents, and the states that transformers computes of them, for tests of other engines.

Knows no engine but by name. Layer indices are post-layer, as everywhere here.
"""

from __future__ import annotations

from typing import Any

import torch

from eagle3.dataset import StatesDataset, StatesMeta
from eagle3.responses import Response
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model

LENGTHS = (70, 1, 33, 33, 5, 120, 18, 64)


def documents(vocab_size: int) -> list[torch.Tensor]:
    """Token ids of all lengths, int32."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (n,), generator=draw, dtype=torch.int32) for n in LENGTHS]


def responses(spec: VerifierSpec) -> list[Response]:
    """The same documents as extraction reads them."""
    return [
        Response(id=f"r{i}", source="s", token_ids=ids.tolist(), loss_mask=[(0, len(ids))])
        for i, ids in enumerate(documents(spec.vocab_size))
    ]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; not a number where either is not."""
    return float((found - expected).abs().max() / expected.abs().max())


def meta_of(
    spec: VerifierSpec, layers: list[int], dtype: str, engine: str, version: str
) -> StatesMeta:
    """What an engine that norms its final states says of them."""
    return StatesMeta(
        verifier=spec.verifier, config_hash=spec.config_hash, engine=engine,
        engine_version=version, aux_layers=layers, final_hidden="post_norm", dtype=dtype,
        hidden_size=spec.hidden_size, vocab_size=spec.vocab_size,
    )  # fmt: skip


def compare(spec: VerifierSpec, dataset: StatesDataset, dtype: str) -> dict[int | str, float]:
    """Largest relative error of every layer over all documents, against transformers."""
    model: Any = load_model(spec, getattr(torch, dtype), "cpu")
    worst: dict[int | str, float] = {}
    for one in dataset:
        with torch.no_grad():
            alone = model(one.token_ids[None].long(), output_hidden_states=True)
        states = {k: alone.hidden_states[k + 1][0] for k in dataset.meta.aux_layers}
        found: dict[int | str, torch.Tensor] = {
            k: one.aux[:, column] for column, k in enumerate(dataset.meta.aux_layers)
        }
        pairs = {k: (found[k], states[k]) for k in states} | {
            "final": (one.final, alone.hidden_states[-1][0]),
            "lse": (one.verifier_lse, alone.logits[0].float().logsumexp(-1)),
        }
        for name, (ours, theirs) in pairs.items():
            error = relative_error(ours.float(), theirs.float())
            worst[name] = max(error, worst.get(name, 0.0))  # not a number stays one
        if dtype == "float32":
            assert torch.equal(one.verifier_top1, alone.logits[0].argmax(-1).int())
    return worst
