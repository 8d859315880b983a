"""Attention of a TTT step: causal over step 0's keys, plus one key of each later step.

A query of step k sees the keys of step 0 up to its own row, and of steps 1..k its own row only. So
the result is one ordinary causal attention whose log-sum-exp is merged with k dot products a row:
no [L, (k+1)L] matrix exists and memory is linear in L. The backward pass needs nothing new either:
an attention backward that is handed the *merged* output and log-sum-exp recomputes the merged
probabilities of step 0's keys, and the k dot products are differentiated by hand.

Legend: N packed rows, R rows with a query, A heads, E head dimension, L rows of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]
BLOCK_ROWS = 512  # queries of one block where no flash kernel is used
# From this length on torch's flash backward for CPU wins: twice as fast at 1,024 rows, and on
# shorter documents behind plain matrix products.
FLASH_ROWS = 256


def ttt_attention(
    q_RAE: Tensor,
    keys_NAE: Tensor,
    values_NAE: Tensor,
    later_keys: Sequence[Tensor],
    later_values: Sequence[Tensor],
    rows_R: Tensor | None,
    documents: Spans,
) -> Tensor:
    """Attention output [R, A, E] of one TTT step.

    Args:
        q_RAE: queries of the rows named by `rows_R`.
        keys_NAE, values_NAE: step 0's keys and values of all packed rows.
        later_keys, later_values: of each later step up to this one, [R, A, E]: own rows only.
        rows_R: i64, ascending packed rows of the queries; None means every row.
        documents: (start, end) of each packed document; rows attend inside their own.
    """
    packed: Tensor = _TTTAttention.apply(
        q_RAE, keys_NAE, values_NAE, rows_R, documents, len(later_keys), *later_keys, *later_values
    )
    return packed


def _spread(x_RAE: Tensor, rows_R: Tensor | None, rows: int) -> Tensor:
    """Puts the rows that have a query back among all packed rows, zeros elsewhere."""
    if rows_R is None:
        return x_RAE
    return x_RAE.new_zeros(rows, *x_RAE.shape[1:]).index_copy_(0, rows_R, x_RAE)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_RAE: Tensor,
        keys_NAE: Tensor,
        values_NAE: Tensor,
        rows_R: Tensor | None,
        documents: Spans,
        steps: int,
        *later: Tensor,
    ) -> Tensor:
        later_keys, later_values = later[:steps], later[steps:]
        scale = q_RAE.shape[-1] ** -0.5
        q_NAE = _spread(q_RAE, rows_R, len(keys_NAE))
        out_NAE, lse_NA = causal_forward(q_NAE, keys_NAE, values_NAE, documents)
        out_RAE = out_NAE if rows_R is None else out_NAE[rows_R]
        if steps:
            lse_RA = lse_NA if rows_R is None else lse_NA[rows_R]
            wide = lse_RA.dtype
            scores = torch.stack(
                [(q_RAE * key).sum(-1, dtype=wide) * scale for key in later_keys] + [lse_RA]
            )
            merged_RA = torch.logsumexp(scores, dim=0)
            weights = (scores - merged_RA).exp_().to(q_RAE.dtype)
            out_RAE = out_RAE * weights[-1, ..., None]
            for weight, value in zip(weights, later_values, strict=False):
                out_RAE.addcmul_(weight[..., None], value)
            lse_NA = merged_RA if rows_R is None else lse_NA.index_copy(0, rows_R, merged_RA)
        ctx.rows_R, ctx.documents, ctx.steps = rows_R, documents, steps
        ctx.save_for_backward(q_RAE, keys_NAE, values_NAE, out_RAE, lse_NA, *later)
        return out_RAE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad_RAE,) = grads
        q_RAE, keys_NAE, values_NAE, out_RAE, lse_NA, *later = ctx.saved_tensors
        rows_R, steps = ctx.rows_R, ctx.steps
        later_keys, later_values = later[:steps], later[steps:]
        rows, scale = len(keys_NAE), q_RAE.shape[-1] ** -0.5
        grad_q_NAE, grad_keys, grad_values = causal_backward(
            _spread(grad_RAE, rows_R, rows),
            _spread(q_RAE, rows_R, rows),
            keys_NAE,
            values_NAE,
            _spread(out_RAE, rows_R, rows),
            lse_NA,
            ctx.documents,
        )
        grad_q_RAE = grad_q_NAE if rows_R is None else grad_q_NAE[rows_R]
        grad_later_keys, grad_later_values = [], []
        if steps:
            lse_RA = lse_NA if rows_R is None else lse_NA[rows_R]
            wide = lse_RA.dtype
            delta_RA = (grad_RAE * out_RAE).sum(-1, dtype=wide)
            for key, value in zip(later_keys, later_values, strict=True):
                weight_RA = ((q_RAE * key).sum(-1, dtype=wide) * scale - lse_RA).exp_()
                grad_score = ((grad_RAE * value).sum(-1, dtype=wide) - delta_RA) * weight_RA
                grad_score = (grad_score * scale).to(q_RAE.dtype)[..., None]
                grad_q_RAE = torch.addcmul(grad_q_RAE, grad_score, key)
                grad_later_keys.append(grad_score * q_RAE)
                grad_later_values.append(weight_RA.to(q_RAE.dtype)[..., None] * grad_RAE)
        return (
            grad_q_RAE,
            grad_keys,
            grad_values,
            None,
            None,
            None,
            *grad_later_keys,
            *grad_later_values,
        )


def causal_forward(
    q_NAE: Tensor, k_NAE: Tensor, v_NAE: Tensor, documents: Spans
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: output [N, A, E] and log-sum-exp [N, A]."""
    out_NAE = torch.empty_like(q_NAE)
    wide = torch.promote_types(q_NAE.dtype, torch.float32)
    lse_NA = torch.empty(q_NAE.shape[:2], dtype=wide, device=q_NAE.device)
    for start, end in documents:
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_NAE, k_NAE, v_NAE))
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[None], k[None], v[None], 0.0, True
            )
            out, lse = out[0], lse[0]
        else:
            out, lse = blocked_forward(q, k, v)
        out_NAE[start:end] = out.transpose(0, 1)
        lse_NA[start:end] = lse.transpose(0, 1)
    return out_NAE, lse_NA


def causal_backward(
    grad_NAE: Tensor,
    q_NAE: Tensor,
    k_NAE: Tensor,
    v_NAE: Tensor,
    out_NAE: Tensor,
    lse_NA: Tensor,
    documents: Spans,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given output and log-sum-exp (merged ones too).

    Flash kernels recompute the probabilities of step 0's keys from the log-sum-exp they are given,
    so that a merged one gives merged probabilities.
    """
    delta_NA = (grad_NAE * out_NAE).sum(-1, dtype=lse_NA.dtype)
    grads = torch.empty_like(q_NAE), torch.empty_like(k_NAE), torch.empty_like(v_NAE)
    for start, end in documents:
        grad, q, k, v = (x[start:end].transpose(0, 1) for x in (grad_NAE, q_NAE, k_NAE, v_NAE))
        lse, delta = (x[start:end].transpose(0, 1) for x in (lse_NA, delta_NA))
        if q.device.type == "cpu" and end - start >= FLASH_ROWS:
            out = out_NAE[start:end].transpose(0, 1)
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(x[None] for x in (grad, q, k, v, out, lse)), 0.0, True
            )
            made = tuple(x[0] for x in flash)
        else:
            made = blocked_backward(grad, q, k, v, lse, delta)
        for target, source in zip(grads, made, strict=True):
            target[start:end] = source.transpose(0, 1)
    return grads


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK_ROWS, length)) for start in range(0, length, BLOCK_ROWS)]


def _weights(q: Tensor, k: Tensor, first: int, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax weights of a block of queries, rows `first` on, over keys up to its end; and lse.

    Scores are wide, as inside flash kernels: rounded to bfloat16 they would shift exponents of 10
    by 4%.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * q.shape[-1] ** -0.5) @ k.to(wide).transpose(-1, -2)
    own = torch.arange(first, first + q.shape[1], device=q.device)
    future = torch.arange(k.shape[1], device=q.device) > own[:, None]
    scores.masked_fill_(future, float("-inf"))
    if lse is None:
        lse = torch.logsumexp(scores, dim=-1)
    return scores.sub_(lse[..., None]).exp_(), lse


def blocked_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of one document, [A, L, E] each: output and log-sum-exp [A, L].

    For devices whose public kernels give no log-sum-exp.
    """
    outs, lses = [], []
    for start, end in _blocks(q.shape[1]):
        weights, lse = _weights(q[:, start:end], k[:, :end], start, None)
        outs.append(weights.to(v.dtype) @ v[:, :end])
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def blocked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_AL: Tensor, delta_AL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one document, [A, L, E] each; memory linear in L."""
    scale = q.shape[-1] ** -0.5
    blocks = _blocks(q.shape[1])
    # Sums over blocks are wide; a single block needs none.
    wide = lse_AL.dtype if len(blocks) > 1 else k.dtype
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for start, end in blocks:
        own = slice(start, end)
        weights, _ = _weights(q[:, own], k[:, :end], start, lse_AL[:, own])
        grad_weights = grad[:, own] @ v[:, :end].transpose(-1, -2)
        grad_v[:, :end] += weights.to(v.dtype).transpose(-1, -2) @ grad[:, own]
        grad_scores = (grad_weights - delta_AL[:, own, None]).mul_(weights).mul_(scale).to(q.dtype)
        grad_q[:, own] = grad_scores @ k[:, :end]
        grad_k[:, :end] += grad_scores.transpose(-1, -2) @ q[:, own]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)
