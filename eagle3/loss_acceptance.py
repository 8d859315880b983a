"""Losses on the acceptance rate itself: total variation and the two LK losses.

When serving samples, a draft from q is accepted with probability α = Σ min(p, q) (Leviathan et
al., https://arxiv.org/abs/2211.17192). Here p is the verifier's distribution over its *whole*
vocabulary: what lies outside the draft vocabulary can never be accepted, and renormalising p over
the draft vocabulary would count it as if it could. Its normaliser is stored with the states, so
that only the draft vocabulary's logits are needed. Papers: total variation, DistillSpec,
https://arxiv.org/abs/2310.08461; LK losses, https://arxiv.org/abs/2602.23881.

With logits z, q = softmax(z) and below_j = [q_j < p_j], the gradient of α is q_j (below_j - s),
s = Σ below_i q_i. Each TTT step makes p anew from the verifier's final states, chunk by chunk: one
more matrix product, and nothing of size [R, D] is kept, neither between steps nor for the backward
pass. Knows nothing of which rows are supervised.

Legend: R rows, D draft vocabulary, H drafter hidden size, G verifier hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.loss import CHUNK_ROWS, HeadLoss, TargetHead, softmax_and_lse

AcceptanceKind = Literal["tv", "lk_alpha", "lk_lambda"]


@dataclass(frozen=True)
class AcceptanceTargets:
    """What the verifier's distribution at some rows is made from, and the loss against it.

    tv: 1 - α, the total variation distance. Its gradient vanishes where p and q hardly overlap.
    lk_alpha: -log α; its gradient is that of tv over α, bounded like cross-entropy's.
    lk_lambda: λ KL(p' | q) + (1 - λ)(1 - α), p' renormalised over the draft vocabulary (else the
        divergence is infinite), λ = exp(-eta · mean α over the rows given), taken as a constant.

    Attributes:
        final_RG: its final states, in the compute dtype.
        lse_R: float32 or wider, log-sum-exp of its logits over its full vocabulary.
        head: from final states to logits over the draft vocabulary.
        eta: of lk_lambda alone.
    """

    final_RG: Tensor
    lse_R: Tensor
    head: TargetHead
    kind: AcceptanceKind
    eta: float


def acceptance_loss(
    x_RH: Tensor,
    weight_DH: Tensor,
    targets: AcceptanceTargets,
    picked_R: Tensor,
    *,
    argmax: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum over rows of a loss that falls as α rises.

    Args:
        x_RH: what the head reads, after its norm.
        weight_DH: the head; a gradient is made for it only if it asks for one.
        targets: of a superset of rows.
        picked_R: i64, the target of each row.
        argmax: also return the draft-vocabulary id with the highest logit.

    Returns:
        The sum; the least that it could be (where q is p', so that α is the share of p that lies
        in the draft vocabulary), both float32 or wider; and i64 [R] or None.
    """
    loss, least, best = _AcceptanceLoss.apply(x_RH, weight_DH, targets, picked_R, argmax)
    return loss, least, best


def overlap(p_RD: Tensor, q_RD: Tensor) -> tuple[Tensor, Tensor]:
    """α [R], float32 or wider, and its gradient [R, D] in the logits of q; overwrites p."""
    wide = torch.promote_types(q_RD.dtype, torch.float32)
    alpha_R = torch.minimum(p_RD, q_RD).sum(-1, dtype=wide)
    below_RD = p_RD.gt_(q_RD).mul_(q_RD)  # in place, comparisons are as fast as products
    share_R1 = below_RD.sum(-1, keepdim=True, dtype=wide).to(q_RD.dtype)
    return alpha_R, below_RD.addcmul_(q_RD, share_R1, value=-1)


class _Gradient:
    """Gradients in x and, where wanted, in the head of a sum of terms over chunks of rows."""

    def __init__(self, x_RH: Tensor, weight_DH: Tensor, trained_head: bool) -> None:
        self._x_RH, self._weight_DH = x_RH, weight_DH
        wide = torch.promote_types(x_RH.dtype, torch.float32)
        self.x_RH = torch.empty_like(x_RH)
        self.weight_DH = torch.zeros_like(weight_DH, dtype=wide) if trained_head else None

    def add(self, rows: slice, logits_RD: Tensor, factor_R: Tensor | float) -> None:
        """Takes a gradient in the logits of some rows, given without a factor of each row."""
        # H columns instead of D take the factor.
        if isinstance(factor_R, Tensor):
            factor_R = factor_R.to(logits_RD.dtype)[:, None]
        torch.mm(logits_RD, self._weight_DH, out=self.x_RH[rows]).mul_(factor_R)
        if self.weight_DH is not None:
            self.weight_DH += logits_RD.T @ (self._x_RH[rows] * factor_R)

    def mix(self, other: _Gradient, share: float) -> None:
        """Becomes (1 - share) of itself and `share` of another."""
        self.x_RH.lerp_(other.x_RH, share)
        if self.weight_DH is not None and other.weight_DH is not None:
            self.weight_DH.lerp_(other.weight_DH, share)


class _AcceptanceLoss(HeadLoss):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        weight_DH: Tensor,
        targets: AcceptanceTargets,
        picked_R: Tensor,
        argmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        kind = targets.kind
        wide = torch.promote_types(x_RH.dtype, torch.float32)
        tiny = torch.finfo(wide).tiny
        rows = len(x_RH)
        missed, least, divergence = (
            torch.zeros((), dtype=wide, device=x_RH.device) for _ in range(3)
        )
        gradient = _Gradient(x_RH, weight_DH, ctx.needs_input_grad[1])
        to_p = _Gradient(x_RH, weight_DH, ctx.needs_input_grad[1]) if kind == "lk_lambda" else None
        best = torch.empty(rows, dtype=torch.int64, device=x_RH.device) if argmax else None
        for start in range(0, rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            picked = picked_R[chunk]
            target_logits = targets.head.logits(targets.final_RG[picked])
            inner, inner_lse = softmax_and_lse(target_logits, target_logits.max(-1).indices)
            # The logits' rounding can put the draft vocabulary's share a little above all.
            inside = (inner_lse - targets.lse_R[picked]).exp_().clamp_(max=1.0)
            logits = x_RH[chunk] @ weight_DH.T
            if best is not None:
                best[chunk] = logits.max(-1).indices
            if to_p is None:
                q = logits.softmax(-1)
            else:
                q, lse = softmax_and_lse(logits, logits.max(-1).indices)
                apart = target_logits.sub_(logits).mul_(inner).sum(-1, dtype=wide)
                divergence += (apart - inner_lse + lse).sum()
                to_p.add(chunk, q - inner, 1.0)
            alpha, slope = overlap(inner.mul_(inside.to(inner.dtype)[:, None]), q)
            if kind == "lk_alpha":
                alpha.clamp_(min=tiny)
                missed -= alpha.log().sum()
                least -= inside.clamp(min=tiny).log_().sum()
                gradient.add(chunk, slope, -1 / alpha)
            else:
                missed += (1 - alpha).sum()
                least += (1 - inside).sum()
                gradient.add(chunk, slope, -1.0)
        loss = missed
        if to_p is not None:
            share = torch.exp(-targets.eta * (1 - missed / max(rows, 1)))
            loss, least = torch.lerp(missed, divergence, share), least * (1 - share)
            gradient.mix(to_p, share.item())
        ctx.save_for_backward(gradient.x_RH, gradient.weight_DH)
        ctx.weight_dtype = weight_DH.dtype
        ctx.mark_non_differentiable(least)
        if best is not None:
            ctx.mark_non_differentiable(best)
        return loss, least, best
