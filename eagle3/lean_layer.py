"""A Llama block for decoding: few operations a row, weights side by side, keys in one buffer.

With one to a few rows and small layers, what is between the matrix products costs as much as they
do. So queries, keys and values are one product, gate and up another, and rotation is in place.
Verifiers and drafters share it. Knows nothing of either.

Shape suffixes: N new rows, L rows in the cache, H hidden size, I width of the layer's input,
A query heads, K key-value heads, T = A + 2K, G = A / K, E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle3.drafter import DraftCache
from eagle3.packed_linear import pack_linears

Product = Callable[[Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Heads and constants of a block; `scaling` is of the attention's scores."""

    heads: int
    kv_heads: int
    head_size: int
    scaling: float
    eps: float


class LeanLayer:
    """Attention and gated MLP with their residuals, for inference.

    Args:
        layer: whose weights these are: a decoder layer with transformers' names, with or without
            norms over each head before the rotation.
        pack: weights laid out for a CPU's matrix units, where `eagle3.packed_linear` can.
    """

    def __init__(self, shape: LayerShape, layer: Any, *, pack: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._shape = shape
        self._qkv = product(_fused(attention.q_proj, attention.k_proj, attention.v_proj), pack=pack)
        self._out = product(attention.o_proj, pack=pack)
        self._gate_up = product(_fused(mlp.gate_proj, mlp.up_proj), pack=pack)
        self._down = product(mlp.down_proj, pack=pack)
        self._post_norm_H = layer.post_attention_layernorm.weight.detach()
        self._head_norms: tuple[Tensor, Tensor] | None = None
        if hasattr(attention, "q_norm") and hasattr(attention, "k_norm"):
            self._head_norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()

    def forward(
        self,
        input_NI: Tensor,
        residual_NH: Tensor,
        rotation: Rotation,
        cache: DraftCache,
        mask: Tensor | None,
    ) -> Tensor:
        """The block's output [N, H] for rows that follow those in the cache.

        Args:
            input_NI: what queries, keys and values are made of.
            rotation: of the new rows' positions, from `rotations`.
            mask: from `causal_mask`, for several rows after others.
        """
        shape, rows = self._shape, len(input_NI)
        heads, size = shape.heads, shape.head_size
        qkv_NTE = self._qkv(input_NI).view(rows, -1, size)
        turned = qkv_NTE[:, : heads + shape.kv_heads]
        if self._head_norms is not None:
            for part, weight_E in zip(
                (turned[:, :heads], turned[:, heads:]), self._head_norms, strict=True
            ):
                part.copy_(torch.rms_norm(part, (size,), weight_E, shape.eps))
        cos_N1E, sin_N1E = rotation
        other_half = turned.roll(size // 2, -1).mul_(sin_N1E)
        turned.mul_(cos_N1E).add_(other_half)
        keys_LKE, values_LKE = cache.append(turned[:, heads:], qkv_NTE[:, -shape.kv_heads :])
        mixed = self._attend(turned[:, :heads], keys_LKE, values_LKE, mask)
        hidden_NH = self._out(mixed).add_(residual_NH)
        width = hidden_NH.shape[1]
        normed_NH = torch.rms_norm(hidden_NH, (width,), self._post_norm_H, shape.eps)
        gate, up = self._gate_up(normed_NH).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up)).add_(hidden_NH)

    def _attend(
        self, q_NAE: Tensor, keys_LKE: Tensor, values_LKE: Tensor, mask: Tensor | None
    ) -> Tensor:
        """[N, A·E]. The heads of a group share keys and values, so their queries stand in line as
        G·N rows of one head: keys and values are never repeated."""
        (rows, heads, size), kv_heads = q_NAE.shape, self._shape.kv_heads
        attention = functional.scaled_dot_product_attention
        keys_1KLE = keys_LKE.transpose(0, 1)[None]
        values_1KLE = values_LKE.transpose(0, 1)[None]
        scale = self._shape.scaling
        if rows > 1 and mask is None:  # nothing came before
            mixed = attention(
                q_NAE.transpose(0, 1)[None],
                keys_1KLE,
                values_1KLE,
                is_causal=True,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            return mixed[0].transpose(0, 1).reshape(rows, -1)
        if rows == 1:
            grouped = q_NAE.reshape(1, kv_heads, -1, size)
            return attention(grouped, keys_1KLE, values_1KLE, scale=scale).reshape(1, -1)
        lined = q_NAE.view(rows, kv_heads, -1, size).permute(1, 2, 0, 3)
        grouped = lined.reshape(1, kv_heads, -1, size)
        mixed = attention(grouped, keys_1KLE, values_1KLE, attn_mask=mask, scale=scale)
        return mixed.view(kv_heads, -1, rows, size).permute(2, 0, 1, 3).reshape(rows, -1)


def _fused(*linears: nn.Linear) -> nn.Linear:
    """Linear layers of one input as one whose outputs stand side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise ValueError("either all of the layers have a bias or none")
    width, outputs = weight.shape[1], weight.shape[0]
    made = nn.Linear(width, outputs, bias=bool(biases), device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        made.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return made


def product(linear: nn.Linear, *, pack: bool) -> Product:
    """What the layer computes, as a function; packed where that is asked for and possible."""
    holder = nn.Sequential(linear)
    if pack:
        pack_linears(holder)
    chosen: Product = holder[0]
    return chosen


def rotations(cos_NE: Tensor, sin_NE: Tensor) -> Rotation:
    """Cosines and sines of whole heads, halves alike, as `LeanLayer` takes them: [N, 1, E].

    The first half's sines are negative: x·cos + roll(x, E/2)·sin is then Llama's rotation.
    """
    first, second = sin_NE.chunk(2, dim=-1)
    return cos_NE[:, None], torch.cat([-first, second], dim=-1)[:, None]


def causal_mask(rows: int, length: int, shape: LayerShape, like: Tensor) -> Tensor | None:
    """[G·N, L], 0 where a new row may look and -inf elsewhere; None where no mask is needed.

    Args:
        length: rows in the cache, the new ones included.
    """
    if rows in (1, length):
        return None
    corner = _corner(rows, shape.heads // shape.kv_heads, like.dtype, like.device)
    return functional.pad(corner, (length - rows, 0))


@functools.lru_cache(maxsize=8)
def _corner(rows: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    hidden = torch.full((rows, rows), float("-inf"), dtype=dtype, device=device).triu(1)
    return hidden.repeat(group, 1)
