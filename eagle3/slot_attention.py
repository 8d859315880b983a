"""Attention of one new token a row over many rows' caches, for transformers models on a CPU.

A decoding step reads each cached key and value once and does little with it. Two batched matrix
products with the keys as the larger operand come within half of what reading alone costs; the
stock fused kernel takes a third longer. Knows nothing of slots or sequences.

Shape suffixes: N rows, Q new tokens, A query heads, h key-value heads, g = A / h, T cached tokens,
D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "eagle3_slots"


def slot_attention(
    module: nn.Module,
    query_NAQD: Tensor,
    key_NhTD: Tensor,
    value_NhTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' calling convention; the mask is additive, [N, 1, Q, T].

    Prompts (Q > 1), other masks and whatever else a model asks for go to the stock kernel.
    """
    rows, query_heads, new, size = query_NAQD.shape
    extras = any(kwargs.get(name) is not None for name in ("s_aux", "softcap", "position_bias"))
    if new > 1 or extras or attention_mask is None or not attention_mask.is_floating_point():
        return sdpa_attention_forward(
            module, query_NAQD, key_NhTD, value_NhTD, attention_mask,
            dropout=dropout, scaling=scaling, **kwargs,
        )  # fmt: skip
    heads = key_NhTD.shape[1]
    query_NhDg = query_NAQD.view(rows, heads, query_heads // heads, size).transpose(-1, -2)
    scores_NhgT = torch.matmul(key_NhTD, query_NhDg).transpose(-1, -2).contiguous().float()
    scores_NhgT.mul_(size**-0.5 if scaling is None else scaling).add_(attention_mask)
    weights_NhgT = scores_NhgT.softmax(dim=-1).to(value_NhTD.dtype)
    out_NhgD = torch.matmul(weights_NhgT, value_NhTD)
    return out_NhgD.reshape(rows, 1, query_heads, -1), None


@contextlib.contextmanager
def use_slot_attention(decoder: Any) -> Iterator[None]:
    """Switches a decoder's attention while the block runs, where it is the stock one on a CPU."""
    stock = decoder.config._attn_implementation
    fits = stock == "sdpa" and decoder.device.type == "cpu"
    if not fits:
        yield
        return
    AttentionInterface.register(NAME, slot_attention)
    # Whoever else calls the model meanwhile gets the masks that the stock kernel gets.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        decoder.set_attn_implementation(stock)
