"""One drafter under many conventions: which states it is fed, and how its layer is computed.

A drafter does not know how it was trained. Fed the outputs of other layers, or computed with
another residual, it runs without an error and accepts less: its τ by replay says how much less.
Knows nothing of which convention is the right one.

Legend: T tokens of a document, L layers of the verifier and its embeddings, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.acceptance import PromptCounts
from eagle3.dataset import Document
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.extraction.base import StatesEngine
from eagle3.extraction.run import plan_batches
from eagle3.packing import pack
from eagle3.parity import EMBEDDINGS
from eagle3.reference import every_output, spread
from eagle3.replay import replay
from eagle3.rope import inverse_frequencies
from eagle3.ttt import cast_weights, ttt_steps
from eagle3.verifier_head import VerifierHead

BATCH_TOKENS = 2048
ROWS = 512  # whose drafts are looked at one by one


@dataclass(frozen=True, kw_only=True)
class ServedAs:
    """How a drafter is served.

    Attributes:
        aux_layers: post-layer indices in the order of the slots; `EMBEDDINGS` is one.
        shift: row t is fed the states of token t + shift.
        switches: keys of `DrafterConfig` that differ from the checkpoint's.
        own_norm: times the drafter's last norm is applied before its head. Only its argmax is
            looked at, which the size of a state does not change.
        rope: whether queries and keys are turned at all.
    """

    aux_layers: tuple[int, ...]
    shift: int = 0
    switches: tuple[tuple[str, Any], ...] = ()
    own_norm: Literal[0, 1, 2] = 1
    rope: bool = True

    def switched(self, name: str, value: Any) -> ServedAs:
        """The same with another value of one of the drafter's settings."""
        others = tuple(item for item in self.switches if item[0] != name)
        return replace(self, switches=(*others, (name, value)))


@dataclass(frozen=True)
class LayeredDocument:
    """A document with the outputs of all layers.

    Attributes:
        document: as stored; its aux states are not used.
        outputs_TLH: embeddings first, then the output of every layer.
        post_TH: the state that the verifier's head reads.
    """

    document: Document
    outputs_TLH: Tensor
    post_TH: Tensor


def replayable(documents: Sequence[Document], most: int, *, where: object) -> list[Document]:
    """Up to `most` documents with one answer each, evenly out of those given.

    Raises:
        HarnessError: there is none.
    """
    good = []
    for document in documents:
        answer = document.loss_mask.nonzero()[:, 0]
        if len(answer) > 1 and int(answer[-1] - answer[0]) + 1 == len(answer) and answer[0] > 0:
            good.append(document)
    if not good:
        raise HarnessError(
            "no document can be replayed", where=where,
            rule="a prompt, then one answer: supervised tokens in one run",
            got=f"none among {len(documents)}",
            fix="data with one answer a sample, or a test split of it",
        )  # fmt: skip
    return [good[i] for i in spread(len(good), most)]


def with_layers(
    documents: Sequence[Document], engine: StatesEngine, head: VerifierHead
) -> list[LayeredDocument]:
    """Documents with the states of all layers.

    Args:
        engine: opened for the outputs of all layers, in order.
    """
    made: dict[int, LayeredDocument] = {}
    for batch in plan_batches([len(document.token_ids) for document in documents], BATCH_TOKENS):
        states = engine.extract([documents[i].token_ids for i in batch])
        for i, one in zip(batch, states, strict=True):
            outputs_TLH = every_output(documents[i].token_ids, one, head)
            made[i] = LayeredDocument(documents[i], outputs_TLH, one.final_TH)
    return [made[i] for i in range(len(documents))]


def fed(layered: LayeredDocument, convention: ServedAs) -> Document:
    """The document with the aux states that a convention feeds the drafter."""
    rows = torch.arange(len(layered.outputs_TLH)) + convention.shift
    rows = rows.clamp(0, len(layered.outputs_TLH) - 1)
    places = [layer - EMBEDDINGS for layer in convention.aux_layers]
    return replace(layered.document, aux=layered.outputs_TLH[rows][:, places])


def computed(drafter: Drafter, convention: ServedAs) -> Drafter:
    """The drafter as a convention computes it; the one given stays as it is."""
    made = copy.copy(drafter)
    made.config = drafter.config.model_copy(update=dict(convention.switches))
    made._buffers = dict(drafter._buffers)
    made._modules = dict(drafter._modules)
    if "rope_theta" in dict(convention.switches):
        made.inverse_frequencies = inverse_frequencies(made.config)
    if not convention.rope:
        made.inverse_frequencies = torch.zeros_like(drafter.inverse_frequencies)
    if convention.own_norm != 1:
        norm = copy.deepcopy(drafter.norm)
        # Without the norm a state points along itself, after two along itself times w twice.
        norm.weight.data = norm.weight.data**convention.own_norm
        made.norm = norm
    return made


def replayed(
    drafter: Drafter,
    layered: Sequence[LayeredDocument],
    convention: ServedAs,
    k: int,
    *,
    dtype: torch.dtype,
) -> list[PromptCounts]:
    """Counts of chain drafting under a convention, by replay; see `eagle3.replay`."""
    documents = [fed(item, convention) for item in layered]
    return replay(computed(drafter, convention), documents, k, dtype=dtype)


@dataclass(frozen=True)
class Drafts:
    """What was drafted at rows whose next three tokens follow in their document, evenly picked.

    Attributes:
        loss_R: f32, what the tokens that followed cost as first and as second draft, in nats;
            those that the drafter cannot say are left out.
        first_R, place_R: i64, the token drafted first, and the row of the packed documents that it
            was drafted for.
    """

    loss_R: Tensor
    first_R: Tensor
    place_R: Tensor


@torch.no_grad()
def drafted(
    drafter: Drafter,
    layered: Sequence[LayeredDocument],
    convention: ServedAs,
    *,
    dtype: torch.dtype,
) -> Drafts:
    """First and second drafts under a convention, at up to `ROWS` rows of all documents."""
    made = computed(drafter, convention)
    weights = cast_weights(made, dtype)
    draft_of = torch.full((made.config.vocab_size,), -1)
    every = torch.arange(made.config.draft_vocab_size)
    draft_of[made.target_ids(every)] = every
    batch = pack(
        [fed(item, convention) for item in layered],
        max(len(item.document.token_ids) for item in layered),
    )
    mask_N, place_N = batch.loss_mask_N, batch.document_N
    ahead_N = mask_N.roll(-1) & mask_N.roll(-2) & (place_N.roll(-3) == place_N)
    rows_R = ahead_N[: len(mask_N) - 3].nonzero()[:, 0]
    if len(rows_R) > ROWS:
        rows_R = rows_R[torch.linspace(0, len(rows_R) - 1, ROWS).round().long()]
    losses, first_R = [], rows_R
    for step, out_RH in enumerate(ttt_steps(made, weights, batch, rows_R, 2)):
        logits_RD = (out_RH @ weights.head_DH.T).float()
        wanted_R = draft_of[batch.token_ids_N[rows_R + 2 + step]]
        known_R = wanted_R >= 0
        chosen = logits_RD[known_R].gather(1, wanted_R[known_R, None])[:, 0]
        losses.append(logits_RD[known_R].logsumexp(-1) - chosen)
        if not step:
            first_R = made.target_ids(logits_RD.max(-1).indices)
    return Drafts(torch.cat(losses), first_R, rows_R + 2)
