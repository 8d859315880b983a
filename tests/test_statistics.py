"""Statistics against numbers worked out by hand and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3.acceptance import conditional_rates, unconditional_rates
from eagle3.seeding import generator
from eagle3.statistics import (
    Counts,
    best_drafts,
    break_even,
    length_difference,
    length_interval,
    lengths_by_drafts,
    overall_length,
    resampled_lengths,
    speed_up,
)


def test_length_is_a_ratio_of_sums() -> None:
    counts = Counts.of([[10, 0]], [[10, 90]])
    assert overall_length(counts) == 1.1  # the mean of the prompts' own would be 1.5
    assert overall_length(Counts.of([[10, 0], [20, 0]], [[10, 90], [10, 90]])) == 1.15
    assert overall_length(Counts.of([[0]], [[0]])) == 1.0


def test_rates() -> None:
    accepted, steps = [60, 30, 3], 120
    assert unconditional_rates(accepted, steps) == [0.5, 0.25, 0.025]
    assert conditional_rates(accepted, steps) == [0.5, 0.5, 0.1]
    assert conditional_rates([4, 0, 0], 8) == [0.5, 0.0, None]
    assert unconditional_rates([0, 0], 0) == [0.0, 0.0]
    assert lengths_by_drafts([0.5, 0.25, 0.025]) == pytest.approx([1.5, 1.75, 1.775])


def test_costs() -> None:
    assert break_even(1.1, 0.05, 3) == pytest.approx(1.25)
    assert speed_up(1.5, 1.1, 0.05, 3) == pytest.approx(1.2)
    best, speeds = best_drafts([0.5, 0.25, 0.025], [1.0, 1.05, 1.1], 0.1)
    assert speeds == pytest.approx([1.5 / 1.1, 1.75 / 1.25, 1.775 / 1.4])
    assert best == 2
    assert best_drafts([0.1], [1.05], 0.1)[0] == 0


def test_interval_against_closed_form() -> None:
    """Ratio of sums over many prompts: normal, with the delta method's standard error."""
    made = torch.Generator().manual_seed(0)
    steps = torch.randint(20, 60, (1, 400), generator=made).double()
    rate = torch.rand(1, 400, generator=made, dtype=torch.float64)
    accepted = (steps * rate).round()
    counts = Counts(accepted, steps)
    got = length_interval(counts, resamples=10_000, level=0.95, generator=generator("test"))
    ratio = accepted.sum() / steps.sum()
    residual = accepted - ratio * steps
    error = math.sqrt(float((residual**2).sum())) / float(steps.sum())
    assert got.value == pytest.approx(1 + float(ratio))
    assert got.low == pytest.approx(got.value - 1.96 * error, abs=0.06 * error)
    assert got.high == pytest.approx(got.value + 1.96 * error, abs=0.06 * error)


def test_pairing_removes_what_prompts_share() -> None:
    """Prompts differ a lot, the arms by exactly 0.1 on each: the interval is a point."""
    steps = [[100] * 50]
    first = [[prompt * 2 for prompt in range(50)]]
    second = [[prompt * 2 + 10 for prompt in range(50)]]
    got = length_difference(
        Counts.of(first, steps),
        Counts.of(second, steps),
        resamples=2000,
        level=0.95,
        generator=generator("test"),
    )
    assert (got.value, got.low, got.high) == pytest.approx((0.1, 0.1, 0.1))
    alone = length_interval(
        Counts.of(first, steps), resamples=2000, level=0.95, generator=generator("test")
    )
    assert alone.high - alone.low > 0.1


def test_two_prompts_are_enumerable() -> None:
    """Of two prompts, resamples are (a, a), (a, b), (b, b) with chances 1/4, 1/2, 1/4."""
    counts = Counts.of([[5, 20]], [[10, 10]])
    lengths = resampled_lengths([counts], 40_000, generator("test"))[0]
    for value, chance in ((1.5, 0.25), (2.25, 0.5), (3.0, 0.25)):
        share = float(
            torch.isclose(lengths, torch.tensor(value, dtype=torch.float64)).double().mean()
        )
        assert share == pytest.approx(chance, abs=0.015)


def test_seeds_widen_the_interval() -> None:
    """Seeds that disagree: with prompts alone resampled, the interval would be a point."""
    counts = Counts.of([[10] * 30, [30] * 30, [50] * 30], [[100] * 30] * 3)
    got = length_interval(counts, resamples=4000, level=0.95, generator=generator("test"))
    assert got.value == pytest.approx(1.3)
    assert (got.low, got.high) == pytest.approx((1.1, 1.5))


def test_named_generator_repeats() -> None:
    counts = Counts.of([[1, 5, 9, 2]], [[9, 9, 9, 9]])
    runs = [
        length_interval(counts, resamples=100, level=0.9, generator=generator("a", 1))
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError):
        Counts.of([[1, 2]], [[1]])
    with pytest.raises(ValueError):
        resampled_lengths(
            [Counts.of([[1]], [[1]]), Counts.of([[1, 1]], [[1, 1]])], 5, generator("a")
        )
