"""What stored final states are, told from the data and the verifier's head alone.

No engine: each reading of the final state (before the last norm, after it, after it twice; at its
token or a row beside) gives logits, and the right one predicts the next tokens best. What counts is
how many it gets right: greedy tokens cost less loss under a distribution that is too sharp. What
the data says of itself (`verifier_top1`, `verifier_lse`) is held against the same logits. Says
nothing of the aux states.

Legend: N rows, H hidden size, V vocabulary, Q readings, F shifts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3.dataset import Document
from eagle3.logits import head_logits
from eagle3.parity import Norm
from eagle3.verifier_head import VerifierHead

NORMS = (0, 1, 2)
SHIFTS = (0, 1, -1, 2)  # the declared one first
ROWS = 1024  # at most, evenly out of all supervised ones
CHUNK_ROWS = 128
SURE = 5.0  # standard errors by which another reading has to predict better
AGREE = 0.9  # share of rows; logits rounded to bfloat16 change the argmax of one in fifty or so


@dataclass(frozen=True, kw_only=True)
class FinalCheck:
    """The final states of some documents under every reading.

    Attributes:
        rows: counted.
        accuracies, losses: share of next tokens that are the argmax, and their mean loss in nats,
            by reading: "pre_norm", "post_norm", "twice", each at its token.
        norms, shift: the reading that predicts best: times that the stored state went through the
            last norm, and s where row t holds the state of token t + s.
        top1_agreement: share of rows whose stored `verifier_top1` is the argmax of the logits.
        lse_error: median of |stored log-sum-exp - that of the logits|, nats.
        faults: in words; empty where nothing contradicts the declaration.
    """

    rows: int
    accuracies: dict[str, float]
    losses: dict[str, float]
    norms: int
    shift: int
    top1_agreement: float
    lse_error: float
    faults: list[str]


@torch.no_grad()
def check_final(
    documents: Sequence[Document],
    head: VerifierHead,
    norm: Norm,
    declared: Literal["pre_norm", "post_norm"],
) -> FinalCheck | None:
    """Reads the final states of some documents in every way; None without rows to count."""
    picked = [_rows(document) for document in documents]
    count = sum(map(len, picked))
    if not count:
        return None
    final_NH = torch.cat([d.final[rows] for d, rows in zip(documents, picked, strict=True)])
    targets_FN = torch.stack(
        [
            torch.cat(
                [d.token_ids[rows + 1 + s] for d, rows in zip(documents, picked, strict=True)]
            )
            for s in SHIFTS
        ]
    ).long()
    top1_N = torch.cat([d.verifier_top1[rows] for d, rows in zip(documents, picked, strict=True)])
    lse_N = torch.cat([d.verifier_lse[rows] for d, rows in zip(documents, picked, strict=True)])
    if count > ROWS:
        some = torch.linspace(0, count - 1, ROWS).round().long()
        final_NH, targets_FN = final_NH[some], targets_FN[:, some]
        top1_N, lse_N = top1_N[some], lse_N[some]

    own = int(declared == "post_norm")
    losses_QN = final_NH.new_empty(3, len(final_NH), dtype=torch.float32)
    hits_QFN = losses_QN.new_empty(3, len(SHIFTS), len(final_NH))
    same, apart = 0, []
    for start in range(0, len(final_NH), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        for q in NORMS:
            logits_NV = head_logits(_post_norm(final_NH[chunk].float(), q, norm), head)
            sums_N = logits_NV.logsumexp(-1)
            best_N = logits_NV.max(-1).indices
            hits_QFN[q, :, chunk] = (best_N == targets_FN[:, chunk]).float()
            likely_N1 = logits_NV.gather(1, targets_FN[0, chunk, None])
            losses_QN[q, chunk] = sums_N - likely_N1[:, 0]
            if q == own:
                same += int((best_N == top1_N[chunk]).sum())
                apart.append((sums_N - lse_N[chunk]).abs())
    means_QF = hits_QFN.mean(-1)
    best = int(means_QF.argmax())
    norms, f = best // len(SHIFTS), best % len(SHIFTS)
    gain_N = hits_QFN[norms, f] - hits_QFN[own, 0]
    error = float(gain_N.std()) / math.sqrt(len(gain_N)) if len(gain_N) > 1 else math.inf
    if float(gain_N.mean()) <= SURE * error:  # also where the declared one is best
        norms, f = own, 0
    agreement = same / len(final_NH)
    lse_error = float(torch.cat(apart).median())
    faults = _faults(norms, own, SHIFTS[f], means_QF[:, f].tolist())
    if not faults and agreement < AGREE:
        faults.append(
            f"verifier_top1 is the argmax of final's logits in {agreement:.0%} of the rows only: "
            "it comes from other states, or from other rows"
        )
    names = ("pre_norm", "post_norm", "twice")
    return FinalCheck(
        rows=len(final_NH),
        accuracies={name: float(means_QF[q, 0]) for q, name in enumerate(names)},
        losses={name: float(losses_QN[q].mean()) for q, name in enumerate(names)},
        norms=norms,
        shift=SHIFTS[f],
        top1_agreement=agreement,
        lse_error=lse_error,
        faults=faults,
    )


def _rows(document: Document) -> Tensor:
    """Rows whose next token is supervised, and that have a token at every shift."""
    t = torch.arange(len(document.token_ids))
    inside = (t + 1 + min(SHIFTS) >= 0) & (t + 1 + max(SHIFTS) < len(t))
    return (inside & document.loss_mask.bool().roll(-1)).nonzero()[:, 0]


def _post_norm(stored_NH: Tensor, norms: int, norm: Norm) -> Tensor:
    """What the head reads, of a state stored after so many last norms.

    A second norm is undone exactly: x = w u with a u of unit RMS becomes w x / rms(x), so u lies
    along the stored state over w twice.
    """
    if norms == 0:
        return norm(stored_NH)
    if norms == 1:
        return stored_NH
    weight_H = norm.weight_H.float()
    safe_H = torch.where(weight_H.abs() > 1e-3, weight_H, torch.full_like(weight_H, torch.inf))
    return norm(stored_NH / safe_H.square())


def _faults(norms: int, own: int, shift: int, right: Sequence[float]) -> list[str]:
    faults = []
    if norms != own:
        said = ("pre-norm", "post-norm")[own]
        text = (
            "final went through the last norm twice"
            if norms == 2
            else f"final is {('pre', 'post')[norms]}-norm"
        )
        faults.append(
            f"{text}, declared {said}: read so, it gets {right[norms]:.0%} of the next tokens "
            f"right instead of {right[own]:.0%}"
        )
    if shift:
        cause = "the first row is missing (prefix cache), or rows" if shift > 0 else "rows"
        faults.append(
            f"row t of final holds the state of token t {'+' if shift > 0 else '-'} {abs(shift)}: "
            f"{cause} were shifted when stored"
        )
    return faults
