"""States of every layer from an engine, for stored documents: what parity compares with.

Any engine that extracts will do (`eagle3.extraction.base.StatesEngine`), as long as it was opened
for `reference_layers`. Knows nothing of what is concluded.

Legend: T tokens of a document, n aux layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eagle3.dataset import ROWS, Document
from eagle3.extraction.base import States, StatesEngine
from eagle3.extraction.run import plan_batches
from eagle3.parity import EMBEDDINGS, Declared, Measured, Norm, Reference, measure
from eagle3.verifier_head import VerifierHead

BATCH_TOKENS = 1024
TWICE = 4  # documents that the engine computes a second time, each alone, to measure its noise


def reference_layers(num_hidden_layers: int, *, last: bool = True) -> list[int]:
    """Post-layer indices that an engine has to be opened for: all, or all but the last."""
    return list(range(num_hidden_layers - (not last)))


def head_norm(head: VerifierHead) -> Norm:
    """The verifier's last norm."""
    return Norm(weight_H=head.norm_weight, eps=head.config.rms_norm_eps)


def spread(count: int, most: int) -> list[int]:
    """Up to `most` of `count` indices, evenly."""
    return sorted({round(i) for i in torch.linspace(0, count - 1, min(most, count)).tolist()})


def measured(
    documents: Sequence[Document],
    engine: StatesEngine,
    head: VerifierHead,
    declared: Declared,
    *,
    max_tokens: int,
) -> Iterator[Measured]:
    """Every document against the engine's states of it, one after another.

    Args:
        engine: opened for `reference_layers`, the last one if it can.
        max_tokens: of a document, from its start: states don't depend on what follows. A document
            whose rows are not as many as its tokens is compared whole.
    """
    cut = [_cut(document, max_tokens) for document in documents]
    norm = head_norm(head)
    for batch in plan_batches([len(document.token_ids) for document in cut], BATCH_TOKENS):
        states = engine.extract([cut[i].token_ids for i in batch])
        for i, one in zip(batch, states, strict=True):
            again = engine.extract([cut[i].token_ids])[0] if i < TWICE else None
            yield measure(
                cut[i].id,
                cut[i].aux,
                cut[i].final,
                _reference(cut[i], one, engine, head, norm),
                None if again is None else _reference(cut[i], again, engine, head, norm),
                declared,
                norm,
            )


def every_output(token_ids: torch.Tensor, states: States, head: VerifierHead) -> torch.Tensor:
    """Embeddings, then the outputs of the captured layers, [T, 1 + n, H], in the states' dtype."""
    embedded_TH = head.embed[token_ids.long()].to(states.aux_TnH.dtype)
    embedded_TH = embedded_TH * head.config.embed_scale
    return torch.cat([embedded_TH[:, None], states.aux_TnH], dim=1)


def first_rows(document: Document, count: int) -> Document:
    """A document cut short, which states before the cut do not see."""
    rows = {name: getattr(document, name)[:count] for name in ROWS}
    return Document(id=document.id, source=document.source, **rows)


def _reference(
    document: Document, states: States, engine: StatesEngine, head: VerifierHead, norm: Norm
) -> Reference:
    pre_norm = engine.identity.final_hidden == "pre_norm"
    captured = states.aux_TnH.shape[1]
    return Reference(
        layers=(EMBEDDINGS, *reference_layers(head.config.num_hidden_layers)[:captured]),
        outputs_TLH=every_output(document.token_ids, states, head),
        post_TH=norm(states.final_TH) if pre_norm else states.final_TH,
    )


def _cut(document: Document, max_tokens: int) -> Document:
    if len(document.final) != len(document.token_ids):
        return document
    return first_rows(document, max_tokens)
