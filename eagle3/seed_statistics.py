"""Two recipes against each other, each trained with several seeds: the seed is the unit.

A recipe's τ is a ratio of sums over prompts; both recipes are trained with the same seeds, so a
comparison has one paired difference a seed, with all prompts nested inside. A bootstrap over
prompts would take one lucky training for a better recipe. Knows nothing of files or of training.

Shape suffixes: S seeds, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from eagle3.statistics import Counts, Estimate

MOST = 100_000  # seeds or prompts looked at before "more than anybody has"
TAIL, NODES = 1e-13, 300  # of the integral in `power`: what is left out, and where it is taken


@dataclass(frozen=True)
class Components:
    """Variances of τ (or of a difference of two τ) and where they come from.

    A training's τ over P prompts varies by `seed + residual / P` around its recipe's on the same
    prompts, and by `prompt / P` more on other prompts.

    Attributes:
        seed: between trainings.
        prompt: between prompts, the same in every training.
        residual: of one prompt in one training.
    """

    seed: float
    prompt: float
    residual: float

    def of_a_seed(self, prompts: int) -> float:
        """Variance of one training's value over so many prompts, on the same prompts."""
        return self.seed + self.residual / prompts


def lengths_by_seed(counts: Counts) -> list[float]:
    """τ of every seed over all its prompts together."""
    steps_S = counts.steps_SP.sum(1).clamp(min=1)
    return (1.0 + counts.accepted_SP.sum(1) / steps_S).tolist()


def paired_differences(first: Counts, second: Counts) -> list[float]:
    """τ of `second` minus τ of `first`, seed by seed.

    Raises:
        ValueError: not the same seeds and prompts.
    """
    if first.accepted_SP.shape != second.accepted_SP.shape:
        raise ValueError("paired counts have the same seeds and prompts")
    pairs = zip(lengths_by_seed(first), lengths_by_seed(second), strict=True)
    return [two - one for one, two in pairs]


def t_interval(values: Sequence[float], level: float) -> Estimate:
    """Mean and its t-interval, one value a seed.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError("an interval over seeds needs two of them or more")
    mean = sum(values) / len(values)
    half = _quantile(level, len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample, with n - 1."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def power(effect: float, sd: float, seeds: int, level: float) -> float:
    """How often a true difference is told from none by `t_interval`: tails of the noncentral t.

    Integrated here over the sample's own deviation, which is chi-distributed: scipy's `nct` gives
    no number at some of the places that a comparison comes to.

    Args:
        effect: the true difference.
        sd: standard deviation of the differences between seeds.
    """
    import numpy
    from scipy.stats import chi, norm

    if sd == 0.0:
        return 1.0 if effect else 0.0
    freedom = seeds - 1
    edge, away = _quantile(level, freedom), abs(effect) * math.sqrt(seeds) / sd
    low, high = chi.ppf(TAIL, freedom), chi.isf(TAIL, freedom)
    nodes, weights = numpy.polynomial.legendre.leggauss(NODES)
    at = low + (high - low) * (nodes + 1.0) / 2.0
    beyond = edge * at / math.sqrt(freedom)
    told = norm.sf(beyond - away) + norm.cdf(-beyond - away)
    return min(float((high - low) / 2.0 * (weights * chi.pdf(at, freedom) * told).sum()), 1.0)


def seeds_needed(effect: float, sd: float, *, level: float, wanted: float) -> int | None:
    """Fewest seeds whose power reaches `wanted`; None above `MOST`."""
    return _least(lambda seeds: power(effect, sd, seeds, level) >= wanted, 2)


def prompts_needed(
    effect: float, components: Components, seeds: int, *, level: float, wanted: float
) -> int | None:
    """Fewest prompts whose power reaches `wanted` with so many seeds; None above `MOST`.

    More prompts take nothing off the variance between trainings, so there may be no answer.
    """

    def enough(prompts: int) -> bool:
        sd = math.sqrt(components.of_a_seed(prompts))
        return power(effect, sd, seeds, level) >= wanted

    return _least(enough, 1)


def components(counts: Counts) -> Components:
    """Of one recipe's τ, from several trainings of it."""
    return _components(_contributions(counts))


def difference_components(first: Counts, second: Counts) -> Components:
    """Of the seed-paired difference of two recipes."""
    return _components(_contributions(second) - _contributions(first))


def _contributions(counts: Counts) -> Tensor:
    """What each prompt of each training adds to τ, f64[S, P]: a row's mean is that training's τ.

    To first order, as a ratio of sums goes: (accepted - R·steps) / mean steps, with R over all.
    """
    ratio = counts.accepted_SP.sum() / counts.steps_SP.sum()
    left_SP = counts.accepted_SP - ratio * counts.steps_SP
    return 1.0 + ratio + left_SP / counts.steps_SP.mean()


def _components(values_SP: Tensor) -> Components:
    """Two crossed random effects, one value a cell: mean squares and their expectations."""
    seeds, prompts = values_SP.shape
    if seeds < 2 or prompts < 2:
        raise ValueError("variance components need two seeds and two prompts or more")
    mean = values_SP.mean()
    seed_S, prompt_P = values_SP.mean(1) - mean, values_SP.mean(0) - mean
    rest_SP = values_SP - mean - seed_S[:, None] - prompt_P[None]
    residual = float(rest_SP.square().sum()) / ((seeds - 1) * (prompts - 1))
    between_seeds = prompts * float(seed_S.square().sum()) / (seeds - 1)
    between_prompts = seeds * float(prompt_P.square().sum()) / (prompts - 1)
    return Components(
        seed=max((between_seeds - residual) / prompts, 0.0),
        prompt=max((between_prompts - residual) / seeds, 0.0),
        residual=residual,
    )


def _quantile(level: float, freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + level / 2, freedom))


def _least(enough: Callable[[int], bool], first: int) -> int | None:
    """The least whole number from `first` on that is enough, where every larger one is too."""
    low, high = first - 1, first
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
