"""Documents put end to end in one batch: no padding, and rows never see another document.

Holds the one definition of a supervised row. Knows nothing of the drafter.

Legend: N packed rows, P aux layers, G verifier hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.dataset import Document
from eagle3.seeding import generator


@dataclass(frozen=True)
class Batch:
    """Packed documents, unshifted: row t belongs to token t.

    Attributes:
        ids: sample ids, in packed order.
        token_ids_N: i64.
        loss_mask_N: bool, the token is one that the verifier answered.
        document_N: i64, which document a row lies in.
        positions_N: i64, place in its document.
        spans: (start, end) of each document.
        aux_NPG, final_NG: the verifier's states.
        top1_N: i64, the verifier's argmax over its full vocabulary.
        lse_N: f32, log-sum-exp of its logits over its full vocabulary.
    """

    ids: tuple[str, ...]
    token_ids_N: Tensor
    loss_mask_N: Tensor
    document_N: Tensor
    positions_N: Tensor
    spans: tuple[tuple[int, int], ...]
    aux_NPG: Tensor
    final_NG: Tensor
    top1_N: Tensor
    lse_N: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def pack(documents: Sequence[Document], max_length: int) -> Batch:
    """Packs documents; one longer than `max_length` rows keeps its first rows."""
    cut = [min(len(document.token_ids), max_length) for document in documents]
    ends = torch.tensor(cut).cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, cut, strict=True)]

    def joined(name: str) -> Tensor:
        return torch.cat(
            [
                getattr(document, name)[:length]
                for document, length in zip(documents, cut, strict=True)
            ]
        )

    return Batch(
        ids=tuple(document.id for document in documents),
        token_ids_N=joined("token_ids").long(),
        loss_mask_N=joined("loss_mask").bool(),
        document_N=torch.repeat_interleave(torch.arange(len(cut)), torch.tensor(cut)),
        positions_N=torch.cat([torch.arange(length) for length in cut]),
        spans=tuple(zip(starts, ends, strict=True)),
        aux_NPG=joined("aux"),
        final_NG=joined("final"),
        top1_N=joined("verifier_top1").long(),
        lse_N=joined("verifier_lse"),
    )


def supervised_rows(batch: Batch, step: int) -> Tensor:
    """Whether row t enters the loss at TTT step `step`: bool [N].

    Row t of step k is asked for the token at t+2+k, whose distribution stands at t+1+k. It counts
    if and only if the token at t+1+k was answered by the verifier and t+2+k lies in the same
    document: serving never drafts the first answer token.
    """
    return _within(batch, step + 2) & shifted(batch.loss_mask_N, step + 1)


def measured_rows(batch: Batch, step: int) -> Tensor:
    """Supervised rows that also count in accuracies: the verifier answered t+1 and t+2+k too."""
    answered = shifted(batch.loss_mask_N, 1) & shifted(batch.loss_mask_N, step + 2)
    return supervised_rows(batch, step) & answered


def shifted(values_N: Tensor, by: int) -> Tensor:
    """Row t holds what stands at t + by; rows for which there is nothing hold zeros."""
    out = torch.zeros_like(values_N)
    if abs(by) >= len(values_N):
        return out
    if by >= 0:
        out[: len(values_N) - by] = values_N[by:]
    else:
        out[-by:] = values_N[:by]
    return out


def _within(batch: Batch, by: int) -> Tensor:
    """Whether row t + by lies in the document of row t."""
    # Zeros shifted in must not look like document 0: count documents from 1.
    document = batch.document_N + 1
    return shifted(document, by) == document


def packed_order(
    lengths: Sequence[int], batch_tokens: int, max_length: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Batches of one epoch as lists of document indices.

    Documents are shuffled by a generator named by run seed and epoch, then taken in order until
    the next one would pass `batch_tokens`; the order depends on nothing else, so that arms and
    resumed runs see the same.
    """
    order = torch.randperm(len(lengths), generator=generator("order", seed, epoch)).tolist()
    batches: list[list[int]] = []
    filled = batch_tokens + 1
    for index in order:
        length = min(lengths[index], max_length)
        if filled + length > batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += length
    return batches
