"""How τ grows with the data: a saturating law fitted to a few points, and what it foretells.

The law is τ(n) = τ∞ - a·n^-b. It is written by its values at the first and the last point, so that
an even prior over them means the same for every b. For each b on a grid that is a linear regression
with a posterior in closed form; draws from all of them are the law with its uncertainty, that of
the exponent included (Bayesian linear regression: Gelman et al., Bayesian Data Analysis, ch. 14).
Knows nothing of training or files.

Legend: N observations, D draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.statistics import Estimate

EXPONENTS = torch.arange(1, 151, dtype=torch.float64) / 50.0  # b from 0.02, nearly no bend, to 3
LEAST = 1e-9  # standard deviation of observations that lie on a curve to the last digit


@dataclass(frozen=True)
class Law:
    """Draws of the law, f64[D] each, over sizes from `first` to `last`."""

    first: float
    last: float
    low_D: Tensor
    high_D: Tensor
    exponent_D: Tensor
    sd_D: Tensor

    def at(self, size: float) -> Tensor:
        """τ at a size, f64[D]."""
        return self.high_D - (self.high_D - self.low_D) * _bend(
            torch.tensor(size, dtype=torch.float64), self.exponent_D, self.first, self.last
        )

    @property
    def limit_D(self) -> Tensor:
        """τ∞, f64[D]."""
        return self.at(math.inf)


def fit(
    sizes: Sequence[float],
    values: Sequence[float],
    *,
    most: float,
    draws: int,
    generator: torch.Generator,
) -> Law:
    """The law behind some trainings.

    Args:
        sizes, values: one of each a training; several trainings of one size are several entries.
        most: τ∞ is not above it, one more than the drafts of a step.

    Raises:
        ValueError: fewer than three sizes, fewer than four trainings, or values that no rising law
            below `most` has.
    """
    if len(set(sizes)) < 3 or len(values) < 4:
        raise ValueError("a law needs three sizes and four trainings or more")
    first, last = min(sizes), max(sizes)
    size_N = torch.tensor(sizes, dtype=torch.float64)
    value_N = torch.tensor(values, dtype=torch.float64)
    freedom = len(values) - 2
    solutions, roots, residuals, weights = [], [], [], []
    for exponent in EXPONENTS:
        bend_N = _bend(size_N, exponent, first, last)
        design = torch.stack([bend_N, 1.0 - bend_N], dim=1)
        inverse = torch.linalg.inv(design.T @ design)
        solution = inverse @ design.T @ value_N
        residual = float((value_N - design @ solution).square().sum()) + freedom * LEAST**2
        solutions.append(solution)
        roots.append(torch.linalg.cholesky(inverse))
        residuals.append(residual)
        weights.append(0.5 * float(torch.logdet(inverse)) - 0.5 * freedom * math.log(residual))
    weight = torch.softmax(torch.tensor(weights, dtype=torch.float64), 0)
    chosen_D = torch.multinomial(weight, draws, replacement=True, generator=generator)
    normal = torch.randn(draws, freedom + 2, dtype=torch.float64, generator=generator)
    chi_D = normal[:, 2:].square().sum(1)
    sd_D = (torch.tensor(residuals, dtype=torch.float64)[chosen_D] / chi_D).sqrt()
    noise = (torch.stack(roots)[chosen_D] @ normal[:, :2, None]).squeeze(2)
    ends = torch.stack(solutions)[chosen_D] + sd_D[:, None] * noise
    law = Law(first, last, ends[:, 0], ends[:, 1], EXPONENTS[chosen_D], sd_D)
    kept = (law.high_D >= law.low_D) & (law.limit_D <= most)
    if int(kept.sum()) < draws // 100:
        raise ValueError(f"no law that rises and stays below {most} has these values")
    low_D, high_D, exponent_D = law.low_D[kept], law.high_D[kept], law.exponent_D[kept]
    return Law(first, last, low_D, high_D, exponent_D, sd_D[kept])


def predict(law: Law, size: float, *, level: float) -> Estimate:
    """τ at a size: the median of the draws and the interval around it."""
    return _interval(law.at(size), level)


def predict_mean(
    law: Law, size: float, trainings: int, *, level: float, generator: torch.Generator
) -> Estimate:
    """What the mean of so many new trainings of a size would be, their own spread included."""
    noise_D = torch.randn(len(law.sd_D), dtype=torch.float64, generator=generator)
    return _interval(law.at(size) + law.sd_D * noise_D / math.sqrt(trainings), level)


@dataclass(frozen=True)
class Needed:
    """Size at which τ reaches a target; None: above any size.

    Attributes:
        chance: share of the draws whose τ∞ reaches it.
    """

    value: float | None
    low: float | None
    high: float | None
    chance: float


def size_for(law: Law, target: float, *, level: float) -> Needed:
    """The data that a target takes."""
    # high - (high - low)·bend(n) = target, and bend falls with n.
    bend_D = (law.high_D - target) / (law.high_D - law.low_D)
    start_D, end_D = law.first**-law.exponent_D, law.last**-law.exponent_D
    power_D = end_D + bend_D * (start_D - end_D)
    reached_D = power_D > 0
    size_D = (
        torch.where(
            reached_D, power_D.clamp(min=1e-300) ** (-1.0 / law.exponent_D), torch.tensor(math.inf)
        )
        .sort()
        .values
    )
    edge = (1.0 - level) / 2
    low, value, high = (
        float(size_D[min(int(share * len(size_D)), len(size_D) - 1)])
        for share in (edge, 0.5, 1.0 - edge)
    )
    found = [None if math.isinf(item) else item for item in (value, low, high)]
    return Needed(found[0], found[1], found[2], float(reached_D.double().mean()))


def _bend(size: Tensor, exponent: Tensor, first: float, last: float) -> Tensor:
    """1 at the first size, 0 at the last, straight in size^-b between and beyond."""
    start, end = first**-exponent, last**-exponent
    return (size**-exponent - end) / (start - end)


def _interval(values_D: Tensor, level: float) -> Estimate:
    edge = (1.0 - level) / 2
    wanted = torch.tensor([edge, 0.5, 1.0 - edge], dtype=torch.float64)
    low, value, high = torch.quantile(values_D, wanted).tolist()
    return Estimate(value, low, high)
