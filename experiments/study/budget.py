"""A budget in supervised rows times TTT steps, as the packed rows that training counts in.

Knows nothing of time: the same cost is the same rows on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.dataset import Document
from eagle3.schedule import PlannedStep
from eagle3.train_settings import TrainSettings


def supervised(documents: Sequence[Document], max_length: int) -> list[int]:
    """Supervised tokens of each document, as far as training reads it."""
    return [int(document.loss_mask[:max_length].sum()) for document in documents]


def costs(plan: Sequence[PlannedStep], supervised_rows: Sequence[int], ttt_steps: int) -> list[int]:
    """Cost of a plan up to the end of each of its steps."""
    total, sums = 0, []
    for step in plan:
        total += ttt_steps * sum(supervised_rows[i] for batch in step.batches for i in batch)
        sums.append(total)
    return sums


def tokens_for(
    cost: int,
    lengths: Sequence[int],
    supervised_rows: Sequence[int],
    settings: TrainSettings,
    seed: int,
) -> tuple[int, int]:
    """Packed rows that spend a budget; the step that reaches it is the last.

    Returns:
        rows, and what they cost.
    """
    tokens = max(cost, 1)
    while True:
        plan = settings.plan(lengths, seed, tokens=tokens)
        for step, spent in zip(
            plan, costs(plan, supervised_rows, settings.objective.ttt_steps), strict=True
        ):
            if spent >= cost:
                return step.tokens_after, spent
        tokens *= 2


def cost_of(
    tokens: int,
    lengths: Sequence[int],
    supervised_rows: Sequence[int],
    settings: TrainSettings,
    seed: int,
) -> int:
    """What training on so many packed rows costs."""
    plan = settings.plan(lengths, seed, tokens=tokens)
    return costs(plan, supervised_rows, settings.objective.ttt_steps)[-1]
