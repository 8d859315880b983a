"""Training-time test: the drafter run on its own outputs for k steps, as when serving.

Paper: EAGLE-3, https://arxiv.org/abs/2503.01840, section 3. At step 0, row t reads the embedding of
token t+1 and the fused aux states of row t, and predicts the token at t+2. At step k its own output
of step k-1 replaces the aux states, tokens shift by one more and positions grow by one. Its query
sees step 0's keys up to its own row, and its own row of each later step.

Two things follow and make this fast. The embedding half of queries, keys and values depends on the
token alone, so it is computed once and read at shifted rows. And a row that no loss needs only has
to exist as a key of step 0: with one layer, its output is never read.

Legend: N packed rows, R active rows, H hidden size, G verifier hidden size, P aux layers, A heads,
K key-value heads, E head dimension, F width of the MLP, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.attention import ttt_attention
from eagle3.drafter import Drafter, DrafterConfig, rms_norm
from eagle3.packing import Batch
from eagle3.products import linear
from eagle3.rope import rotary


@dataclass(frozen=True)
class Weights:
    """The drafter's weights as one forward pass reads them, in the compute dtype.

    Norm weights that stand before a projection are folded into it; projections that read the same
    rows are one matrix. Made once a batch; gradients flow back into the drafter's parameters.

    Attributes:
        fc: [H, P·G].
        aux_norm: [P, G], a norm for each layer, or [P·G], one for all; None: no norm before `fc`.
        embed_qkv, hidden_qkv: [(A + 2K)·E, H], queries, keys and values of each half of the input.
        hidden_norm: [H], for the residual, which the fold leaves out.
        output: [H, A·E].
        gate_up: [2F, H].
        down: [H, F].
        norm: [H].
        head_DH: the drafter's head.
    """

    fc: Tensor
    aux_norm: Tensor | None
    embed_qkv: Tensor
    hidden_qkv: Tensor
    hidden_norm: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    head_DH: Tensor


def cast_weights(drafter: Drafter, dtype: torch.dtype) -> Weights:
    """Reads the drafter's parameters into `dtype`, differentiably."""
    layer = drafter.midlayer
    attention, mlp = layer.self_attn, layer.mlp
    embed_qkv, hidden_qkv = folded(
        [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        [layer.input_layernorm.weight, layer.hidden_norm.weight],
        dtype,
    )
    (gate_up,) = folded(
        [mlp.gate_proj.weight, mlp.up_proj.weight], [layer.post_attention_layernorm.weight], dtype
    )
    aux_norm = None
    if drafter.config.fc_norm:
        aux_norm = torch.stack(list(drafter.fc_norm.parameters())).to(dtype)
    elif drafter.config.norm_before_fc:
        aux_norm = drafter.aux_norm.weight.to(dtype)
    return Weights(
        fc=drafter.fc.weight.to(dtype),
        aux_norm=aux_norm,
        embed_qkv=embed_qkv,
        hidden_qkv=hidden_qkv,
        hidden_norm=layer.hidden_norm.weight.to(dtype),
        output=attention.o_proj.weight.to(dtype),
        gate_up=gate_up,
        down=mlp.down_proj.weight.to(dtype),
        norm=drafter.norm.weight.to(dtype),
        head_DH=drafter.lm_head.weight.to(dtype),
    )


def folded(
    parts: Sequence[Tensor], norms: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """One matrix for each norm: its columns of all parts, stacked, times the norm, in `dtype`.

    Args:
        parts: weights [O_i, len(norms) * H] of projections that read the same rows.
        norms: [H] each, of the blocks of columns in turn.
    """
    made: tuple[Tensor, ...] = _Folded.apply(dtype, len(norms), *norms, *parts)
    return made


class _Folded(torch.autograd.Function):
    """A few passes over the weights; cat, mul and casts one by one take three times as many."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        norms, parts = inputs[:count], inputs[count:]
        ctx.count = count
        ctx.save_for_backward(*inputs)
        sizes = [len(part) for part in parts]
        made = []
        for block, norm in enumerate(norms):
            out = norm.new_empty(sum(sizes), len(norm), dtype=dtype)
            for part, rows in zip(parts, out.split(sizes), strict=True):
                rows.copy_(part.chunk(count, 1)[block] * norm)
            made.append(out)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        norms, parts = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        sizes = [len(part) for part in parts]
        grad_norms = [torch.zeros_like(norm) for norm in norms]
        grad_parts = [torch.empty_like(part) for part in parts]
        for block, grad in enumerate(grads):
            wide = grad.contiguous().to(norms[block].dtype)
            for part, grad_part, rows in zip(parts, grad_parts, wide.split(sizes), strict=True):
                torch.mul(rows, norms[block], out=grad_part.chunk(ctx.count, 1)[block])
                grad_norms[block] += rows.mul_(part.chunk(ctx.count, 1)[block]).sum(0)
        return None, None, *grad_norms, *grad_parts


def ttt_steps(
    drafter: Drafter, weights: Weights, batch: Batch, active_R: Tensor, steps: int
) -> Iterator[Tensor]:
    """What the head reads (after `norm`), [R, H], of each TTT step in turn.

    Args:
        active_R: i64, ascending rows whose outputs are wanted. Each must have `1 + steps` rows
            after it in the packed batch or be supervised at no step that lacks them.
    """
    config = drafter.config
    eps, heads = config.rms_norm_eps, config.num_attention_heads
    dtype = weights.fc.dtype
    rows = len(batch.token_ids_N)
    every = len(active_R) == rows
    embed_NH = drafter.embed_VH[batch.token_ids_N].to(dtype)
    embed_qkv = linear(unit_norm(embed_NH, eps), weights.embed_qkv)
    fused_NH = _fuse(batch.aux_NPG.to(dtype), weights, config)

    # Step 0: every row is a key; the last row of the batch has no next token and serves nobody.
    next_rows = torch.arange(1, rows + 1, device=active_R.device).clamp_(max=rows - 1)
    normed_NH = unit_norm(fused_NH, eps)
    qkv = linear(normed_NH, weights.hidden_qkv) + embed_qkv.index_select(0, next_rows)
    split = [heads, config.num_key_value_heads]
    qk, v = _heads(qkv, config)
    turn = rotary(batch.positions_N, drafter.inverse_frequencies, dtype)
    q_NAE, k_NKE = turned(qk, *turn).split(split, dim=1)
    keys_NAE, values_NAE = _repeat(k_NKE, heads), _repeat(v, heads)
    rows_R = None if every else active_R
    q_RAE = q_NAE if every else q_NAE.index_select(0, active_R)
    hidden_RH = fused_NH if every else fused_NH.index_select(0, active_R)
    normed_RH = normed_NH if every else normed_NH.index_select(0, active_R)
    later_keys: list[Tensor] = []
    later_values: list[Tensor] = []
    for step in range(steps):
        if step:
            normed_RH = unit_norm(hidden_RH, eps)
            shifted = (active_R + 1 + step).clamp(max=rows - 1)
            qkv = linear(normed_RH, weights.hidden_qkv) + embed_qkv.index_select(0, shifted)
            qk, v = _heads(qkv, config)
            turn = rotary(batch.positions_N[active_R] + step, drafter.inverse_frequencies, dtype)
            q_RAE, k = turned(qk, *turn).split(split, dim=1)
            later_keys.append(_repeat(k, heads))
            later_values.append(_repeat(v, heads))
        mixed_RAE = ttt_attention(
            q_RAE, keys_NAE, values_NAE, later_keys, later_values, rows_R, batch.spans
        )
        residual_RH = normed_RH * weights.hidden_norm if config.norm_before_residual else hidden_RH
        hidden_RH = residual_RH + linear(mixed_RAE.flatten(1), weights.output)
        gated = swiglu(linear(unit_norm(hidden_RH, eps), weights.gate_up))
        hidden_RH = hidden_RH + linear(gated, weights.down)
        normed_out = unit_norm(hidden_RH, eps) * weights.norm
        if config.norm_output:
            hidden_RH = normed_out
        yield normed_out


def _fuse(aux_NPG: Tensor, weights: Weights, config: DrafterConfig) -> Tensor:
    if config.fc_norm and weights.aux_norm is not None:
        aux_NPG = unit_norm(aux_NPG, config.rms_norm_eps) * weights.aux_norm
    flat = aux_NPG.flatten(1)
    if config.norm_before_fc and weights.aux_norm is not None:
        flat = rms_norm(flat, weights.aux_norm, config.rms_norm_eps)
    return linear(flat, weights.fc)


def _heads(qkv: Tensor, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Queries and keys together, which turn alike, and values."""
    kv_heads = config.num_key_value_heads
    split = [config.num_attention_heads + kv_heads, kv_heads]
    # Every size by name: of no rows at all, none can be left to infer.
    qk, v = qkv.view(len(qkv), sum(split), config.head_dim).split(split, dim=1)
    return qk, v


def _repeat(x_NKE: Tensor, heads: int) -> Tensor:
    """Key-value heads once for each query head of their group: [N, A, E]."""
    group = heads // x_NKE.shape[1]
    if group == 1:
        return x_NKE
    rows, _, size = x_NKE.shape
    return x_NKE[:, :, None].expand(-1, -1, group, -1).reshape(rows, heads, size)


def turned(x_NAE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope.rotate` for training: writes into one tensor and keeps none of its inputs."""
    out: Tensor = _Turn.apply(x_NAE, cos[:, None], sin[:, None])
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = torch.empty_like(x)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without its weight, statistics in float32 or wider."""
    out: Tensor = _UnitNorm.apply(x, eps)
    return out


class _UnitNorm(torch.autograd.Function):
    """Keeps the output and one number a row; autograd of the plain formula keeps five copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        # Wide and then rounded: an `out` of another dtype costs copies of everything first.
        out = (x.to(wide) * scale).to(x.dtype)
        ctx.save_for_backward(out, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out, scale = ctx.saved_tensors
        (grad,) = grads
        along = (grad * out).sum(-1, keepdim=True, dtype=scale.dtype).div_(out.shape[-1])
        grad_x = torch.addcmul(grad, out, along.to(out.dtype), value=-1)
        return (grad_x.to(scale.dtype) * scale).to(grad_x.dtype), None


def swiglu(gate_up_R2F: Tensor) -> Tensor:
    """silu(gate) * up of the two halves, [R, F]; keeps the input alone for the backward pass."""
    out: Tensor = _SwiGLU.apply(gate_up_R2F)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out
