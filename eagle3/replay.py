"""Exact greedy acceptance without decoding.

One teacher-forced TTT pass over the verifier's own greedy answers says, for every row, how many of
k drafts the verifier would accept there: as long as drafts are accepted, the tokens that the
drafter reads are the answer's own. Then a walk over each answer, from one verification to the next,
counts what chain decoding would have counted.

Legend: N packed rows, k drafts a verification step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagle3.acceptance import PromptCounts
from eagle3.dataset import Document
from eagle3.drafter import Drafter
from eagle3.packing import Batch, pack
from eagle3.ttt import Weights, cast_weights, ttt_steps

BATCH_ROWS = 2048


@torch.no_grad()
def replay(
    drafter: Drafter, documents: Sequence[Document], k: int, *, dtype: torch.dtype
) -> list[PromptCounts]:
    """Replays chain drafting over the verifier's greedy answers.

    Args:
        documents: each with one answer: its supervised tokens are in one run, greedy ones, and
            followed by at least k more greedy tokens (a tail), so that drafts past the answer's end
            count as engines count them. Without a tail the last step of each answer may count less.
        k: drafts a verification step.
        dtype: of the computation.

    Raises:
        ValueError: a document whose supervised tokens are not one run.
    """
    counts: list[PromptCounts] = []
    weights = cast_weights(drafter, dtype)
    device = drafter.fc.weight.device
    for group in _groups(documents):
        batch = pack(group, max(len(document.token_ids) for document in group)).to(device)
        accepted = accepted_drafts(drafter, batch, k, weights).tolist()
        for document, (start, end) in zip(group, batch.spans, strict=True):
            counts.append(walk(document, accepted[start:end], k))
    return counts


def accepted_drafts(drafter: Drafter, batch: Batch, k: int, weights: Weights) -> Tensor:
    """How many of k drafts made at each row equal the tokens that follow, i64 [N].

    A draft past the end of its document counts as wrong.
    """
    rows_N = torch.arange(len(batch.token_ids_N), device=batch.token_ids_N.device)
    right = torch.ones_like(rows_N, dtype=torch.bool)
    count = torch.zeros_like(rows_N)
    active = batch.loss_mask_N.roll(-1).nonzero()[:, 0]
    active = active[active < len(rows_N) - 1]
    for step, out_RH in enumerate(ttt_steps(drafter, weights, batch, active, k)):
        # max, not argmax: the same index, an order of magnitude faster on CPU.
        best = drafter.target_ids((out_RH @ weights.head_DH.T).max(-1).indices)
        place = (active + 2 + step).clamp(max=len(rows_N) - 1)
        inside = (active + 2 + step < len(rows_N)) & (
            batch.document_N[place] == batch.document_N[active]
        )
        hit = torch.zeros_like(right)
        hit[active] = inside & (best == batch.token_ids_N[place])
        right &= hit
        count += right
    return count


def walk(document: Document, accepted: Sequence[int], k: int) -> PromptCounts:
    """Counts from verification to verification, given the accepted drafts of each row.

    The prefill answers the first token. A step at row t (the newest token is t+1) emits its
    accepted drafts and one bonus token, so the next one is at row t + accepted + 1.
    """
    answer = document.loss_mask.nonzero()[:, 0].tolist()
    if not answer or answer[-1] - answer[0] + 1 != len(answer):
        raise ValueError(f"sample {document.id}: supervised tokens are not one run")
    first, last = answer[0], answer[-1]
    row = first - 1
    steps, positions = 0, [0] * k
    while row + 1 < last:
        for position in range(accepted[row]):
            positions[position] += 1
        row += accepted[row] + 1
        steps += 1
    return PromptCounts(
        id=document.id,
        benchmark=document.source,
        verify_steps=steps,
        drafted=steps * k,
        accepted=sum(positions),
        accepted_per_position=positions,
        tokens=len(answer),
    )


def _groups(documents: Sequence[Document]) -> Iterable[list[Document]]:
    group: list[Document] = []
    rows = 0
    for document in documents:
        if group and rows + len(document.token_ids) > BATCH_ROWS:
            yield group
            group, rows = [], 0
        group.append(document)
        rows += len(document.token_ids)
    if group:
        yield group
