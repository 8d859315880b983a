"""Where one way to train overtakes another as both get more tokens, and how surely.

At every budget there is one paired difference a seed. The token count is the one after which the
mean difference stays above zero; its interval is that of all counts at which zero lies inside the
t-interval of the difference (a test turned round). Between budgets everything is taken as straight
in the logarithm of tokens. Knows nothing of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.seed_statistics import t_interval


@dataclass(frozen=True)
class Crossing:
    """Token counts; 0.0 is before the first budget, None after the last.

    Attributes:
        at: where the later winner overtakes.
        low: from here on it is no longer surely behind.
        high: from here on it is surely ahead.
    """

    at: float | None
    low: float | None
    high: float | None


def crossing(
    tokens: Sequence[int], differences: Sequence[Sequence[float]], level: float
) -> Crossing:
    """Of the differences "later winner minus earlier winner", one list of seeds a budget.

    Args:
        tokens: budgets, ascending.
    """
    intervals = [t_interval(values, level) for values in differences]
    return Crossing(
        at=_last_rise(tokens, [interval.value for interval in intervals]),
        low=_last_rise(tokens, [interval.high for interval in intervals]),
        high=_last_rise(tokens, [interval.low for interval in intervals]),
    )


def _last_rise(tokens: Sequence[int], values: Sequence[float]) -> float | None:
    """Where a curve passes zero for the last time on its way up."""
    below = [index for index, value in enumerate(values) if value < 0.0]
    if not below:
        return 0.0
    last = below[-1]
    if last == len(values) - 1:
        return None
    share = -values[last] / (values[last + 1] - values[last])
    start, end = math.log(tokens[last]), math.log(tokens[last + 1])
    return math.exp(start + share * (end - start))
