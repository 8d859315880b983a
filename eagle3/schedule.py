"""Which documents each optimizer step reads, and its learning rate: both functions of the step.

Nothing here has state, so a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3.packing import packed_order

Scheduler = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step: micro-batches of document indices, and tokens seen once it is done."""

    epoch: int
    batches: tuple[tuple[int, ...], ...]
    tokens_after: int


def plan_steps(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    max_length: int,
    accumulate: int,
    seed: int,
    tokens: int | None,
    epochs: int | None,
) -> list[PlannedStep]:
    """All steps of a run: until `tokens` packed rows are seen, or for whole `epochs`.

    Args:
        tokens: the step that reaches it is the last; one of `tokens` and `epochs` is given.
    """
    if (tokens is None) == (epochs is None):
        raise ValueError("give one of tokens and epochs")
    if not lengths:
        return []  # no number of passes over nothing reaches a budget
    plan: list[PlannedStep] = []
    seen = epoch = 0
    while (tokens is not None and seen < tokens) or (epochs is not None and epoch < epochs):
        order = packed_order(lengths, batch_tokens, max_length, seed=seed, epoch=epoch)
        for first in range(0, len(order), accumulate):
            group = order[first : first + accumulate]
            seen += sum(min(lengths[index], max_length) for batch in group for index in batch)
            plan.append(PlannedStep(epoch, tuple(map(tuple, group)), seen))
            if tokens is not None and seen >= tokens:
                break
        epoch += 1
    return plan


def learning_rate(
    step: int, steps: int, *, peak: float, scheduler: Scheduler, warmup_ratio: float
) -> float:
    """Learning rate of a step (from 0): linear warm-up, then down to 0 at the end, or constant."""
    warmup = math.ceil(steps * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    if scheduler == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
    if scheduler == "linear":
        return peak * (1.0 - done)
    return peak
