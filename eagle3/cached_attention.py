"""A key-value cache that can be cut back for free, and attention over it for short queries.

Both plug into transformers models: the cache as the `Cache` a forward pass takes, the attention as
a registered implementation. One unpadded sequence; knows nothing of drafting.

Shape suffixes: B batch (1), Q query heads, K key-value heads, G = Q / K, N new rows, L rows in the
cache, D head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

GROUPED = "eagle3_grouped"


class BufferLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to grow: appending copies the new rows
    only, cropping is a change of a number."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self._key_buffer = _room(key_states, self._capacity)
        self._value_buffer = _room(value_states, self._capacity)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._length, self._length + key_states.shape[2]
        if end > self._key_buffer.shape[2]:
            self._key_buffer = _grown(self._key_buffer, start, 2 * end)
            self._value_buffer = _grown(self._value_buffer, start, 2 * end)
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self._length = end
        return self._key_buffer[:, :, :end], self._value_buffer[:, :, :end]

    def get_seq_length(self) -> int:
        return self._length

    def keep(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        self._length = min(self._length, length)


def buffer_cache(num_layers: int, capacity: int) -> Cache:
    """An empty cache with room for `capacity` rows; it grows when more come."""
    return Cache(layers=[BufferLayer(capacity) for _ in range(num_layers)])


def grouped_attention(
    module: nn.Module,
    query_BQND: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the newest N rows over a cache, in transformers' calling convention.

    The heads of a group share keys and values, so their queries stand in line as G·N rows of one
    head: keys and values are never repeated. The stock SDPA path does so for N = 1 only, and
    verification has N = k + 1. Ignores `attention_mask` (transformers makes none for an
    implementation that it does not know): the rows are the last N of an unpadded sequence.

    Raises:
        NotImplementedError: the model asks for attention sinks or softcapped scores.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise NotImplementedError(f"{GROUPED} has neither sinks nor softcaps; use eager attention")
    batch, query_heads, new, size = query_BQND.shape
    heads, length = key_BKLD.shape[1], key_BKLD.shape[2]
    group = query_heads // heads
    mask = None
    if new > 1 or (sliding_window is not None and length > sliding_window):
        mask = _causal_mask(new, length, group, sliding_window, query_BQND.dtype, query_BQND.device)
    out = functional.scaled_dot_product_attention(
        query_BQND.reshape(batch, heads, group * new, size),
        key_BKLD,
        value_BKLD,
        attn_mask=mask,
        scale=scaling,
    )
    return out.reshape(batch, query_heads, new, -1).transpose(1, 2), None


def register() -> None:
    """Makes `grouped_attention` known to transformers under the name `GROUPED`."""
    AttentionInterface.register(GROUPED, grouped_attention)


@functools.lru_cache(maxsize=4)  # all layers of a forward pass ask for the same one or two
def _causal_mask(
    new: int,
    length: int,
    group: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[G·N, L], 0 where row n may look, -inf elsewhere."""
    at_N1 = torch.arange(length - new, length, device=device)[:, None]
    key_1L = torch.arange(length, device=device)[None, :]
    hidden_NL = key_1L > at_N1
    if window is not None:
        hidden_NL |= key_1L <= at_N1 - window
    mask_NL = torch.zeros(new, length, dtype=dtype, device=device)
    return mask_NL.masked_fill_(hidden_NL, float("-inf")).repeat(group, 1)


def _room(like: Tensor, capacity: int) -> Tensor:
    batch, heads, rows, size = like.shape
    return like.new_empty(batch, heads, max(capacity, rows), size)


def _grown(buffer: Tensor, used: int, capacity: int) -> Tensor:
    larger = _room(buffer[:, :, :1], capacity)
    larger[:, :, :used] = buffer[:, :, :used]
    return larger
