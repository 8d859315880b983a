"""The scaling law: curves whose answers are known by hand, and intervals that keep their word."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3.scaling import fit, predict, predict_mean, size_for

SIZES = [1000.0, 2000.0, 4000.0, 8000.0, 16000.0]


def law_at(size: float) -> float:
    """τ∞ 2, a = 20, b = 0.5: 1.3675 at 1,000, 1.6838 at 4,000."""
    return 2.0 - 20.0 / math.sqrt(size)


def named(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_points_on_a_curve_give_that_curve() -> None:
    values = [law_at(size) for size in SIZES]
    law = fit(SIZES, values, most=4.0, draws=2000, generator=named())
    assert set(law.exponent_D.tolist()) == {0.5}
    assert law.limit_D.tolist() == pytest.approx([2.0] * len(law.limit_D), abs=1e-5)
    for size in (500.0, 4000.0, 160_000.0):
        found = predict(law, size, level=0.95)
        assert found.value == pytest.approx(law_at(size), abs=1e-5)
        assert found.high - found.low < 1e-5
    # 2 - 20/√n = 1.9 at n = 40,000; 2.1 is never reached.
    needed = size_for(law, 1.9, level=0.95)
    assert needed.value == pytest.approx(40_000, rel=1e-3) and needed.chance == 1.0
    assert needed.low == pytest.approx(40_000, rel=1e-3)
    never = size_for(law, 2.1, level=0.95)
    assert (never.value, never.low, never.high, never.chance) == (None, None, None, 0.0)


def test_a_straight_line_in_the_logarithm_has_no_limit_in_sight() -> None:
    """τ = 1 + 0.1·log2(n/1000): the fit cannot tell where it ends, and its interval says so."""
    sizes = [size for size in SIZES for _ in range(3)]
    wobble = [0.004, -0.004, 0.0]
    values = [1.0 + 0.1 * math.log2(size / 1000) + wobble[i % 3] for i, size in enumerate(sizes)]
    law = fit(sizes, values, most=4.0, draws=4000, generator=named())
    assert float(law.exponent_D.median()) < 0.2
    near = predict(law, 32_000.0, level=0.95)
    assert near.value == pytest.approx(1.5, abs=0.02) and near.high - near.low < 0.05
    far = predict(law, 16_000_000.0, level=0.95)
    assert far.high - far.low > 5 * (near.high - near.low)
    limit = torch.quantile(law.limit_D, torch.tensor([0.025, 0.975], dtype=torch.float64))
    assert limit[1] - limit[0] > 0.5  # nobody can say where it ends


def test_intervals_hold_what_they_promise() -> None:
    """Of 100 noisy curves, the next doubling's mean of three trainings lies inside in about 95."""
    sizes = [size for size in SIZES[:4] for _ in range(3)]
    inside = 0
    draw = named(1)
    for number in range(100):
        noise = 0.01 * torch.randn(len(sizes), generator=draw, dtype=torch.float64)
        values = [law_at(size) + float(e) for size, e in zip(sizes, noise, strict=True)]
        law = fit(sizes, values, most=4.0, draws=1000, generator=named(number))
        found = predict_mean(law, SIZES[4], 3, level=0.95, generator=named(number))
        measured = law_at(SIZES[4]) + 0.01 * float(torch.randn(3, generator=draw).mean())
        inside += found.low <= measured <= found.high
    assert 90 <= inside <= 100


def test_what_is_no_rising_law_is_refused() -> None:
    with pytest.raises(ValueError, match="three sizes"):
        fit([1.0, 2.0, 2.0, 2.0], [1.0, 1.1, 1.1, 1.1], most=4.0, draws=100, generator=named())
    falling = [2.0, 1.8, 1.6, 1.4, 1.2]
    with pytest.raises(ValueError, match="rises"):
        fit(SIZES, falling, most=4.0, draws=1000, generator=named())
