"""The comparison's numbers by hand, and its words for every outcome."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3.acceptance import PromptCounts
from eagle3.comparison import CompareSettings, compare, speed_words, verdict, winner
from eagle3.errors import HarnessError
from eagle3.statistics import Estimate


def counts(accepted: list[int], steps: int = 100) -> list[PromptCounts]:
    return [
        PromptCounts(
            id=f"p{number}",
            benchmark="mt_bench" if number % 2 else "human_eval",
            verify_steps=steps,
            drafted=3 * steps,
            accepted=value,
            accepted_per_position=[value - value // 3, value // 3, 0],
            tokens=steps + value,
        )
        for number, value in enumerate(accepted)
    ]


TIMING: dict[str, Any] = {
    "speedup": 1.2,
    "break_even_tau": 1.25,
    "r": 1.1,
    "c": 0.05,
    "verify_costs": [1.0, 1.05, 1.1],
}
SETTINGS = CompareSettings(arms=["scratch", "finetune"], resamples=500)


def test_paired_difference() -> None:
    first = [10 + 3 * n for n in range(20)]
    result = compare(
        {"scratch": [counts(first)], "finetune": [counts([n + 6 for n in first])]},
        {"scratch": TIMING},
        SETTINGS,
    )
    found = result["comparison"]
    assert (found["delta"], found["low"], found["high"]) == pytest.approx((0.06, 0.06, 0.06))
    assert found["winner"] == "finetune"
    assert found["by_benchmark"]["mt_bench"]["value"] == pytest.approx(0.06)
    assert "finetune accepts more than scratch" in found["verdict"]
    assert "these two checkpoints" in found["verdict"]
    arm = result["arms"]["scratch"]
    assert arm["tau"]["all"]["value"] == pytest.approx(1 + sum(first) / 2000)
    assert arm["tau"]["all"]["low"] < arm["tau"]["all"]["value"] < arm["tau"]["all"]["high"]
    assert arm["against_no_speculation"] == "faster"
    assert arm["tau_by_drafts"][-1] == pytest.approx(arm["tau"]["all"]["value"])
    rates = [sum(n - n // 3 for n in first) / 2000, sum(n // 3 for n in first) / 2000]
    assert arm["speedup_by_drafts"] == pytest.approx(
        [(1 + rates[0]) / 1.05, (1 + sum(rates)) / 1.15, (1 + sum(rates)) / 1.25]
    )
    assert arm["recommended_k"] == 2
    assert "words" not in result["arms"]["finetune"]


def test_several_seeds() -> None:
    runs = {
        "scratch": [counts([20] * 10), counts([30] * 10)],
        "finetune": [counts([40] * 10), counts([50] * 10)],
    }
    result = compare(runs, {}, SETTINGS)
    assert result["seeds"] == 2
    assert result["comparison"]["delta"] == pytest.approx(0.2)
    assert "2 seeds" in result["comparison"]["verdict"]


def test_words() -> None:
    arms, taus = ["scratch", "finetune"], [1.4, 1.3]
    assert winner(Estimate(-0.1, -0.2, -0.05), arms) == "scratch"
    assert winner(Estimate(-0.1, -0.2, 0.05), arms) is None
    text = verdict(Estimate(-0.1, -0.2, -0.05), arms, taus, seeds=1, prompts=244, level=0.95)
    assert text.startswith(
        "scratch accepts more than finetune: τ 1.400 against 1.300, finetune minus "
        "scratch -0.100 (95% interval -0.200 to -0.050) over 244 prompts."
    )
    text = verdict(Estimate(-0.1, -0.2, 0.05), arms, taus, seeds=3, prompts=9, level=0.9)
    assert text.startswith("No difference between scratch and finetune can be told")
    assert "90% interval" in text


@pytest.mark.parametrize(
    ("speed", "tau", "word"),
    [(1.2, 1.4, "faster"), (0.9, 1.1, "slower"), (1.01, 1.2, "about as fast")],
)
def test_speed_words(speed: float, tau: float, word: str) -> None:
    found, sentence = speed_words(tau, {"speedup": speed, "break_even_tau": 1.25})
    assert found == word
    assert f"{speed:.2f} times" in sentence and "break-even of 1.25" in sentence


def test_bad_input() -> None:
    with pytest.raises(HarnessError, match="no counts"):
        compare({"scratch": [counts([1])]}, {}, SETTINGS)
    with pytest.raises(HarnessError, match="different prompts"):
        compare({"scratch": [counts([1, 2])], "finetune": [counts([1])]}, {}, SETTINGS)
    with pytest.raises(ValueError, match="two different arms"):
        CompareSettings(arms=["scratch", "scratch"])
