"""Soft cross-entropy over the draft vocabulary without ever holding all logits.

For a row x with logits z = W x and a target distribution p over the draft vocabulary D, the loss is
lse(z) - p·z, and p·z = x·(pW): the expected head row t = pW is computed once a batch, so that a TTT
step never touches p. With q = softmax(z) the gradient is qW - t. Both come out of one pass over
chunks of rows that fit the cache; nothing of size [R, D] is kept for the backward pass.

Legend: R rows, D draft vocabulary, H drafter hidden size, G verifier hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.drafter import rms_norm
from eagle3.logits import finish_logits
from eagle3.products import product

CHUNK_ROWS = 512  # 512 x 8192 bf16 logits are 8 MiB: chunks amortise reading the head


@dataclass(frozen=True)
class Targets:
    """The verifier's next-token distribution at some rows, restricted to the draft vocabulary.

    Attributes:
        expected_RH: expected row of the drafter's head under the distribution, t = pW.
        probabilities_RD: the distribution itself, in the logits' dtype; kept only where the head is
            trained, whose gradient needs it.
        best_R: i64, its most likely draft token.
        entropy_R: its entropy in nats, float32 or wider: the loss that a perfect drafter would
            have. None unless asked for.
    """

    expected_RH: Tensor
    probabilities_RD: Tensor | None
    best_R: Tensor
    entropy_R: Tensor | None


@dataclass(frozen=True)
class TargetHead:
    """The verifier's way from a stored final state to logits over the draft vocabulary.

    Attributes:
        rows_DG: the verifier's head rows of the draft vocabulary, in its order, with the
            verifier's logit scale in them.
        norm_G: the verifier's last norm where the stored states are from before it, else None.
        eps: of that norm.
        softcap: c of c·tanh(logits / c), if the verifier caps its logits.
    """

    rows_DG: Tensor
    norm_G: Tensor | None
    eps: float
    softcap: float | None

    def logits(self, final_RG: Tensor) -> Tensor:
        """Verifier logits over the draft vocabulary, [R, D]."""
        if self.norm_G is not None:
            final_RG = rms_norm(final_RG, self.norm_G, self.eps)
        return finish_logits(final_RG @ self.rows_DG.T, softcap=self.softcap)


@torch.no_grad()
def soft_targets(
    final_RG: Tensor, head: TargetHead, draft_head_DH: Tensor, *, keep: bool, entropy: bool
) -> Targets:
    """Targets of rows from the verifier's stored final states.

    Args:
        draft_head_DH: the drafter's head of now.
        keep: keep the distributions.
        entropy: compute their entropies.
    """
    rows = len(final_RG)
    wide = torch.promote_types(final_RG.dtype, torch.float32)
    expected = final_RG.new_empty(rows, draft_head_DH.shape[1])
    best = torch.empty(rows, dtype=torch.int64, device=final_RG.device)
    entropies = torch.empty(rows, dtype=wide, device=final_RG.device) if entropy else None
    kept = final_RG.new_empty(rows, len(head.rows_DG)) if keep else None
    for start in range(0, rows, CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        logits = head.logits(final_RG[chunk])
        # max, not argmax: the same index, an order of magnitude faster on CPU.
        best[chunk] = logits.max(-1).indices
        probabilities, lse = softmax_and_lse(logits, best[chunk])
        expected[chunk] = product(probabilities, draft_head_DH)
        if entropies is not None:
            entropies[chunk] = lse - logits.mul_(probabilities).sum(-1, dtype=wide)
        if kept is not None:
            kept[chunk] = probabilities
    return Targets(expected, kept, best, entropies)


def softmax_and_lse(logits_RD: Tensor, likely_R: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in the logits' dtype and the log-sum-exp, float32 or wider.

    Args:
        likely_R: i64, a token of each row that should not be improbable. Its logit less the
            logarithm of its probability is the log-sum-exp: two reads a row instead of a second
            pass over all of them. A probability that underflows is taken as the smallest number.
    """
    wide = torch.promote_types(logits_RD.dtype, torch.float32)
    probabilities = torch.softmax(logits_RD, dim=-1)
    place = likely_R[:, None]
    likely = probabilities.gather(1, place).to(wide).clamp_min(torch.finfo(wide).tiny)
    return probabilities, (logits_RD.gather(1, place).to(wide) - likely.log_())[:, 0]


def soft_cross_entropy(
    x_RH: Tensor, weight_DH: Tensor, targets: Targets, picked_R: Tensor, *, argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum over rows of the cross-entropy against their targets.

    Args:
        x_RH: what the head reads, after its norm.
        weight_DH: the head; a gradient is made for it only if it asks for one.
        targets: of a superset of rows.
        picked_R: i64, the target of each row.
        argmax: also return the draft-vocabulary id with the highest logit.

    Returns:
        The sum (float32 or wider) and i64 [R] or None.
    """
    loss, best = _SoftCrossEntropy.apply(x_RH, weight_DH, targets, picked_R, argmax)
    return loss, best


class HeadLoss(torch.autograd.Function):
    """A loss of `x_RH` and `weight_DH`, its first two inputs of five, whose forward pass has made
    their gradients: it saves those, and sets `ctx.weight_dtype`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = grads[0]
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight_dtype)
        return grad_x * scale.to(grad_x.dtype), grad_weight, None, None, None


class _SoftCrossEntropy(HeadLoss):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        weight_DH: Tensor,
        targets: Targets,
        picked_R: Tensor,
        argmax: bool,
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(x_RH.dtype, torch.float32)
        rows = len(x_RH)
        expected_RH = targets.expected_RH[picked_R]
        likely_R = targets.best_R[picked_R]
        grad_x = torch.empty_like(x_RH)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if targets.probabilities_RD is None:
                raise ValueError("a trained head needs targets made with keep=True")
            grad_weight = torch.zeros_like(weight_DH, dtype=wide)
        loss = torch.zeros((), dtype=wide, device=x_RH.device)
        best = torch.empty(rows, dtype=torch.int64, device=x_RH.device) if argmax else None
        for start in range(0, rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            x = x_RH[chunk]
            logits = x @ weight_DH.T
            if best is not None:
                best[chunk] = logits.max(-1).indices
            probabilities, lse = softmax_and_lse(logits, likely_R[chunk])
            loss += (lse - (x.to(wide) * expected_RH[chunk]).sum(-1)).sum()
            grad_x[chunk] = product(probabilities, weight_DH)
            if grad_weight is not None and targets.probabilities_RD is not None:
                probabilities -= targets.probabilities_RD[picked_R[chunk]]
                grad_weight += probabilities.T @ x
        grad_x -= expected_RH
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_DH.dtype
        if best is not None:
            ctx.mark_non_differentiable(best)
        return loss, best
