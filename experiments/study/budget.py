"""A budget in supervised rows times TTT steps, as the packed rows that training counts in.

Knows nothing of time: the same cost is the same rows on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from eagle3.dataset import Document
from eagle3.schedule import PlannedStep
from eagle3.train_settings import TrainSettings


def supervised(documents: Sequence[Document], max_length: int) -> list[int]:
    """Supervised tokens of each document, as far as training reads it."""
    return [int(document.loss_mask[:max_length].sum()) for document in documents]


def costs(
    plan: Sequence[PlannedStep], supervised_rows: Sequence[int], settings: TrainSettings
) -> list[int]:
    """What a training on the plan's first step costs, on its first two, and so on."""
    rows = [sum(supervised_rows[i] for batch in step.batches for i in batch) for step in plan]
    upto = [0, *accumulate(rows)]
    return [
        upto[n]
        + (settings.objective.ttt_steps - 1) * (upto[n] - upto[settings.first_draft_steps(n)])
        for n in range(1, len(upto))
    ]


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
        for step, spent in zip(plan, costs(plan, supervised_rows, settings), strict=True):
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
    return costs(plan, supervised_rows, settings)[-1]
