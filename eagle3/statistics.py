"""Acceptance lengths with intervals, paired differences, and what speculation costs and brings.

Works on arrays [seed, prompt]; knows nothing of files, arms or benchmarks.

Shape suffixes: S seeds, P prompts, R resamples, k draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.acceptance import acceptance_length


@dataclass(frozen=True)
class Counts:
    """What verification counted, f64[S, P] each: accepted drafts and verification steps."""

    accepted_SP: Tensor
    steps_SP: Tensor

    @classmethod
    def of(cls, accepted: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> Counts:
        """From nested lists, one row a seed."""
        wide = torch.float64
        return cls(torch.tensor(accepted, dtype=wide), torch.tensor(steps, dtype=wide))

    def __post_init__(self) -> None:
        if self.accepted_SP.shape != self.steps_SP.shape or self.accepted_SP.ndim != 2:
            raise ValueError("accepted and steps are arrays [seed, prompt] of one shape")


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


def overall_length(counts: Counts) -> float:
    """τ over all prompts and seeds at once."""
    return acceptance_length(float(counts.accepted_SP.sum()), float(counts.steps_SP.sum()))


def resampled_lengths(
    counts: Sequence[Counts], resamples: int, generator: torch.Generator
) -> Tensor:
    """τ of every resample, f64[len(counts), R]; all counts are resampled alike (paired).

    A resample draws prompts with replacement, the same ones for all seeds and all counts, and, of
    several seeds, seeds too: prompts alone say nothing of how much training varies.
    """
    seeds, prompts = counts[0].accepted_SP.shape
    if any(item.accepted_SP.shape != (seeds, prompts) for item in counts):
        raise ValueError("paired counts have the same seeds and prompts")
    weights_RP = _weights(resamples, prompts, generator)
    weights_RS = _weights(resamples, seeds, generator) if seeds > 1 else torch.ones(resamples, 1)
    weights_RS = weights_RS.to(torch.float64)
    lengths = []
    for item in counts:
        accepted_R = ((weights_RP @ item.accepted_SP.T) * weights_RS).sum(1)
        steps_R = ((weights_RP @ item.steps_SP.T) * weights_RS).sum(1)
        lengths.append(1.0 + torch.where(steps_R > 0, accepted_R / steps_R.clamp(min=1), 0.0))
    return torch.stack(lengths)


def length_interval(
    counts: Counts, *, resamples: int, level: float, generator: torch.Generator
) -> Estimate:
    """τ with its percentile bootstrap interval.

    Args:
        level: of the interval, 0.95 for 95%.
    """
    lengths_R = resampled_lengths([counts], resamples, generator)[0]
    return Estimate(overall_length(counts), *_percentiles(lengths_R, level))


def length_difference(
    first: Counts, second: Counts, *, resamples: int, level: float, generator: torch.Generator
) -> Estimate:
    """τ of `second` minus τ of `first` by a bootstrap paired over prompts (and seeds)."""
    first_R, second_R = resampled_lengths([first, second], resamples, generator)
    value = overall_length(second) - overall_length(first)
    return Estimate(value, *_percentiles(second_R - first_R, level))


def lengths_by_drafts(unconditional: Sequence[float]) -> list[float]:
    """τ of k' = 1 .. k drafts, from rates measured with k.

    Drafts of a chain do not depend on how many follow, so 1 + the sum of the first k' rates; an
    estimate, since with fewer drafts other rows become the starts of steps.
    """
    total, lengths = 1.0, []
    for rate in unconditional:
        total += rate
        lengths.append(total)
    return lengths


def break_even(verify_cost: float, draft_cost: float, k: int) -> float:
    """The τ below which speculation is slower than none: r + k·c.

    Args:
        verify_cost: r, time to verify k + 1 tokens over the time to decode one.
        draft_cost: c, time of one draft over the time to decode one.
    """
    return verify_cost + k * draft_cost


def speed_up(length: float, verify_cost: float, draft_cost: float, k: int) -> float:
    """S = τ / (r + k·c)."""
    return length / break_even(verify_cost, draft_cost, k)


def best_drafts(
    unconditional: Sequence[float], verify_costs: Sequence[float], draft_cost: float
) -> tuple[int, list[float]]:
    """The number of drafts with the highest modelled speed-up; 0 when none is above 1.

    Args:
        verify_costs: r of 1 .. k drafts.

    Returns:
        The number, and the speed-ups of 1 .. k drafts.
    """
    speeds = [
        speed_up(length, cost, draft_cost, drafts + 1)
        for drafts, (length, cost) in enumerate(
            zip(lengths_by_drafts(unconditional), verify_costs, strict=True)
        )
    ]
    best = max(range(len(speeds)), key=lambda index: speeds[index])
    return (best + 1 if speeds[best] > 1 else 0), speeds


def _weights(resamples: int, items: int, generator: torch.Generator) -> Tensor:
    """How often each of the items was drawn in each resample, f64[R, items]; rows sum to items."""
    drawn = torch.randint(items, (resamples, items), generator=generator)
    weights = torch.zeros(resamples, items, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones(1, 1, dtype=torch.float64).expand_as(drawn))


def _percentiles(values_R: Tensor, level: float) -> tuple[float, float]:
    tail = (1 - level) / 2
    low, high = torch.quantile(values_R, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return float(low), float(high)
