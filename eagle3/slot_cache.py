"""Keys and values of many sequences of different lengths, one slot for each.

A Hugging Face cache whose rows can be written at positions of their own, so that sequences join
and leave a running batch. Knows nothing of tokens or of when a sequence ends.

Shape suffixes: S slots, N rows of this forward pass, Q new tokens a row, T cached tokens, D head
dimension, h key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Slots grow by so many positions: attention over a few positions too many costs less than copying
# all slots at every step would, and a matrix product over rows without gaps is nearly twice as
# fast as over rows with room behind them.
GROWTH = 32


@dataclass
class _Plan:
    """What the next forward pass writes. Apart from the cache, since layers that pointed back at
    it would keep gigabytes alive until a garbage collection."""

    slots: int
    rows_N1: Tensor
    positions_NQ: Tensor
    length: int = 0
    capacity: int = 0
    leading: int | None = None
    spare: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """One decoder layer's keys and values [S, h, T, D]; T grows with what is written."""

    is_sliding = False

    def __init__(self, plan: _Plan) -> None:
        super().__init__()
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.plan.slots, key_states.shape[1], 0)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the rows of the planned pass and returns all that they may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        plan = self.plan
        if plan.capacity != self.keys.shape[2]:
            self.keys = _resized(self.keys, plan)
            self.values = _resized(self.values, plan)
        self.keys[plan.rows_N1, :, plan.positions_NQ] = key_states.transpose(1, 2)
        self.values[plan.rows_N1, :, plan.positions_NQ] = value_states.transpose(1, 2)
        if plan.leading is not None:  # rows 0..n: a view, no copy
            return self.keys[: plan.leading], self.values[: plan.leading]
        rows = plan.rows_N1[:, 0]
        return self.keys[rows, :, : plan.length], self.values[rows, :, : plan.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.length, 0

    def get_seq_length(self) -> int:
        return self.plan.length

    def get_max_length(self) -> int:
        return -1


def _resized(stored: Tensor, plan: _Plan) -> Tensor:
    """The same slots with room for `plan.capacity` positions, in the memory of the spare.

    What they lay in becomes the spare of the next tensor: memory new to the process costs more
    than the copy.
    """
    slots, heads, length, size = stored.shape
    needed = slots * heads * plan.capacity * size
    spare = plan.spare
    if spare is None or len(spare) < needed:
        spare = stored.new_empty(needed + needed // 4)
    resized = spare[:needed].view(slots, heads, plan.capacity, size)
    kept = min(length, plan.capacity)
    resized[:, :, :kept] = stored[:, :, :kept]
    resized[:, :, kept:] = 0  # masked positions weigh nothing, unless they are not numbers
    plan.spare = stored.new_empty(0).set_(stored.untyped_storage())
    return resized


class SlotCache(Cache):
    """All layers, and which rows and positions the next forward pass writes."""

    def __init__(self, num_layers: int, slots: int) -> None:
        none = torch.empty(0, 1, dtype=torch.long)
        self.next = _Plan(slots, none, none)
        super().__init__(layers=[SlotLayer(self.next) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Positions that the planned forward pass attends to, masked or not."""
        return self.next.length

    def plan(self, rows_N: Tensor, positions_NQ: Tensor, *, leading: bool) -> None:
        """Says where the next forward pass writes.

        Args:
            rows_N: slot of each row.
            positions_NQ: position of each new token.
            leading: the rows are slots 0..N-1 in order, which saves a copy.
        """
        self.next.rows_N1, self.next.positions_NQ = rows_N[:, None], positions_NQ
        needed = int(positions_NQ.max()) + 1
        rounded = -(-needed // GROWTH) * GROWTH
        capacity = self.next.capacity
        # Shorter again once long sequences have left, but only by more than one step of growth.
        if rounded > capacity or (leading and rounded < capacity - GROWTH):
            capacity = rounded
        self.next.capacity = capacity
        self.next.length = capacity if leading else rounded
        self.next.leading = len(rows_N) if leading else None

    def share_prefix(self, length: int) -> None:
        """Copies the first `length` positions of slot 0 to every slot."""
        for stored in self._stored():
            stored[1:, :, :length] = stored[:1, :, :length]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot over another's."""
        for stored in self._stored():
            stored[destination, :, :length] = stored[source, :, :length]

    def _stored(self) -> Iterator[Tensor]:
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            assert layer.keys is not None and layer.values is not None
            yield layer.keys
            yield layer.values
