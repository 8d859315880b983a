"""Comparisons with the seed as unit: against hand-computed values and published tables."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3.aa_test import called_different
from eagle3.crossing import crossing
from eagle3.seed_statistics import (
    Components,
    components,
    difference_components,
    lengths_by_seed,
    paired_differences,
    power,
    prompts_needed,
    seeds_needed,
    t_interval,
)
from eagle3.statistics import Counts


def test_differences_are_of_ratios_of_sums() -> None:
    # Seed 0: 1 + 6/10 and 1 + 9/12; seed 1: 1 + 5/10 and 1 + 5/8. Means of prompts would differ.
    first = Counts.of([[1, 5], [2, 3]], [[5, 5], [4, 6]])
    second = Counts.of([[1, 8], [4, 1]], [[4, 8], [5, 3]])
    assert lengths_by_seed(first) == pytest.approx([1.6, 1.5])
    assert paired_differences(first, second) == pytest.approx([0.15, 0.125])
    with pytest.raises(ValueError, match="same seeds"):
        paired_differences(first, Counts.of([[1, 2]], [[3, 4]]))


def test_t_interval_by_hand() -> None:
    # Mean 0.02, deviation 0.01, three seeds: 0.02 ± 4.30265 · 0.01 / √3.
    found = t_interval([0.01, 0.03, 0.02], 0.95)
    assert found.value == pytest.approx(0.02)
    assert found.high - found.value == pytest.approx(0.0248414, abs=1e-6)
    assert found.value - found.low == pytest.approx(0.0248414, abs=1e-6)
    with pytest.raises(ValueError, match="two"):
        t_interval([0.1], 0.95)


def test_power_as_in_published_tables() -> None:
    """Paired t-test, two-sided 5%: dz 1 with 10 pairs has power 0.803; dz 0.5 needs 34 for 80%."""
    assert power(0.05, 0.05, 10, 0.95) == pytest.approx(0.803, abs=5e-4)
    assert power(0.0, 0.05, 10, 0.95) == pytest.approx(0.05)
    assert power(0.05, 0.0, 2, 0.95) == 1.0
    assert power(0.05, 1e-6, 3, 0.95) == pytest.approx(1.0)


def test_power_is_a_number_everywhere() -> None:
    """scipy's noncentral t, where it has a number, and the normal's limit for many seeds."""
    from scipy.stats import nct, norm, t

    compared = 0
    for seeds in (2, 3, 5, 8, 20, 100):
        edge, before = t.ppf(0.975, seeds - 1), 0.0
        for away in (0.0, 0.5, 2.0, 5.0, 9.0, 11.0, 14.0, 30.0, 100.0):
            found = power(away / math.sqrt(seeds), 1.0, seeds, 0.95)
            assert before - 1e-9 <= found <= 1.0
            before = found
            wanted = nct.sf(edge, seeds - 1, away) + nct.cdf(-edge, seeds - 1, away)
            if math.isfinite(wanted):
                compared += 1
                assert found == pytest.approx(wanted, abs=1e-6)
    assert compared > 30
    many = power(2.8 / math.sqrt(50_000), 1.0, 50_000, 0.95)
    assert many == pytest.approx(norm.sf(1.96 - 2.8), abs=1e-4)
    assert seeds_needed(0.05, 0.1, level=0.95, wanted=0.8) == 34
    assert seeds_needed(1e-9, 1.0, level=0.95, wanted=0.8) is None


def test_prompts_needed_is_the_least_that_is_enough() -> None:
    found = Components(seed=1e-4, prompt=1.0, residual=0.5)
    needed = prompts_needed(0.05, found, 5, level=0.95, wanted=0.8)
    assert needed is not None
    sds = [math.sqrt(found.of_a_seed(count)) for count in (needed - 1, needed)]
    assert power(0.05, sds[0], 5, 0.95) < 0.8 <= power(0.05, sds[1], 5, 0.95)
    loud = Components(seed=0.05**2 * 4, prompt=0.0, residual=0.5)
    assert prompts_needed(0.05, loud, 5, level=0.95, wanted=0.8) is None


def test_components_by_hand() -> None:
    """Steps alike, so that a prompt's value is its own τ.

    Values 1.2 1.6 / 1.4 2.2: mean 1.6, seeds ∓0.2, prompts ∓0.3, rest ±0.1. Mean squares: seeds
    2·(0.04+0.04) = 0.16, prompts 2·(0.09+0.09) = 0.36, rest 4·0.01 = 0.04.
    """
    counts = Counts.of([[2, 6], [4, 12]], [[10, 10], [10, 10]])
    found = components(counts)
    assert found.residual == pytest.approx(0.04)
    assert found.seed == pytest.approx((0.16 - 0.04) / 2)
    assert found.prompt == pytest.approx((0.36 - 0.04) / 2)
    same = difference_components(counts, counts)
    assert (same.seed, same.prompt, same.residual) == (0.0, 0.0, 0.0)


def test_a_ratios_components_to_first_order() -> None:
    """The variance between seeds, as components say it, is that of the seeds' τ."""
    draw = torch.Generator().manual_seed(4)
    steps = torch.randint(20, 60, (6, 50), generator=draw).double()
    rate = 0.5 + 0.02 * torch.randn(6, 1, generator=draw) + 0.1 * torch.rand(1, 50, generator=draw)
    counts = Counts((steps * rate).round(), steps)
    found = components(counts)
    lengths = torch.tensor(lengths_by_seed(counts), dtype=torch.float64)
    assert found.of_a_seed(50) == pytest.approx(float(lengths.var()), rel=0.06)


def test_equal_recipes_are_called_different_as_rarely_as_said() -> None:
    """5% of equal ones; of unequal ones as many as the noncentral t says."""
    found = Components(seed=0.015**2, prompt=0.04, residual=0.03)
    steps = torch.randint(60, 160, (244,), generator=torch.Generator().manual_seed(1))

    def share(effect: float) -> float:
        return called_different(
            found,
            steps,
            1.6,
            effect=effect,
            seeds=5,
            simulations=1500,
            level=0.95,
            generator=torch.Generator().manual_seed(7),
        )

    assert share(0.0) == pytest.approx(0.05, abs=0.02)
    sd = math.sqrt(2 * found.of_a_seed(244))
    assert share(0.03) == pytest.approx(power(0.03, sd, 5, 0.95), abs=0.05)


def test_a_crossing_by_hand() -> None:
    """Means -0.2 at 100 and +0.2 at 400: zero halfway in the logarithm, at 200."""
    exact = [[-0.2, -0.2], [0.2, 0.2]]
    found = crossing([100, 400], exact, 0.95)
    assert (found.at, found.low, found.high) == pytest.approx((200.0, 200.0, 200.0))
    # t with one degree of freedom: 12.706 · 0.01 of half-width around each mean.
    spread = [[-0.21, -0.19], [0.19, 0.21]]
    half = 12.7062 * 0.01
    found = crossing([100, 400], spread, 0.95)
    assert found.at == pytest.approx(200.0)
    assert found.low == pytest.approx(100 * 4 ** ((0.2 - half) / 0.4), rel=1e-4)
    assert found.high == pytest.approx(100 * 4 ** ((0.2 + half) / 0.4), rel=1e-4)


def test_crossings_outside_the_budgets() -> None:
    never = crossing([1, 2], [[-0.2, -0.3], [-0.2, -0.3]], 0.95)
    assert never.at is None and never.high is None
    always = crossing([1, 2], [[0.2, 0.2], [0.3, 0.3]], 0.95)
    assert (always.at, always.low, always.high) == (0.0, 0.0, 0.0)
