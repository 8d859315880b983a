"""Arms against each other: who accepts more, how sure that is, and whether either is worth serving.

Knows counts and timings as the evaluate stage writes them, not how they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import Field, field_validator

from eagle3.acceptance import ALL, PromptCounts, by_benchmark, summarise
from eagle3.errors import HarnessError
from eagle3.seeding import generator
from eagle3.settings import Settings
from eagle3.statistics import (
    Counts,
    Estimate,
    best_drafts,
    length_difference,
    length_interval,
    lengths_by_drafts,
)


class CompareSettings(Settings):
    """What is compared.

    Attributes:
        arms: the two arms; the difference is the second's τ minus the first's.
        resamples: of the bootstrap over prompts.
        level: of intervals.
    """

    arms: list[str] = Field(default=["scratch", "finetune"], min_length=2, max_length=2)
    resamples: int = Field(default=10_000, ge=100)
    level: float = Field(default=0.95, gt=0.5, lt=1.0)

    @field_validator("arms")
    @classmethod
    def _two(cls, value: list[str]) -> list[str]:
        if len(set(value)) != 2:
            raise ValueError("two different arms")
        return value


Runs = Sequence[Sequence[PromptCounts]]  # one list of prompts a seed


def compare(
    runs: Mapping[str, Runs], timings: Mapping[str, Mapping[str, Any]], settings: CompareSettings
) -> dict[str, Any]:
    """Everything that the report says of the arms, as plain values.

    Args:
        runs: counts of every arm, the compared ones among them.
        timings: speeds by arm, where there are any.

    Raises:
        HarnessError: a compared arm is missing, or arms were not counted on the same prompts.
    """
    _check(runs, settings.arms)
    first, second = settings.arms
    benchmarks = list(by_benchmark(runs[first][0]))
    seeds, prompts = len(runs[first]), len(runs[first][0])
    difference = {
        name: asdict(
            length_difference(
                counts_of(runs[first], name),
                counts_of(runs[second], name),
                resamples=settings.resamples,
                level=settings.level,
                generator=generator("bootstrap", "difference", name),
            )
        )
        for name in benchmarks
    }
    arms = {name: _arm(run, timings.get(name), settings) for name, run in runs.items()}
    taus = {name: arms[name]["tau"][ALL]["value"] for name in settings.arms}
    return {
        "seeds": seeds,
        "prompts": prompts,
        "resamples": settings.resamples,
        "level": settings.level,
        "arms": arms,
        "comparison": {
            "arms": list(settings.arms),
            "delta": difference[ALL]["value"],
            "low": difference[ALL]["low"],
            "high": difference[ALL]["high"],
            "by_benchmark": difference,
            "winner": winner(Estimate(**difference[ALL]), settings.arms),
            "verdict": verdict(
                Estimate(**difference[ALL]),
                settings.arms,
                [taus[name] for name in settings.arms],
                seeds=seeds,
                prompts=prompts,
                level=settings.level,
            ),
        },
    }


def counts_of(runs: Runs, benchmark: str) -> Counts:
    """Counts of one benchmark (or `ALL`) as arrays [seed, prompt]."""
    chosen = [
        sorted(by_benchmark(prompts)[benchmark], key=lambda item: item.id) for prompts in runs
    ]
    return Counts.of(
        [[item.accepted for item in prompts] for prompts in chosen],
        [[item.verify_steps for item in prompts] for prompts in chosen],
    )


def winner(difference: Estimate, arms: Sequence[str]) -> str | None:
    """The arm that accepts more, None where the interval holds zero."""
    if difference.low > 0:
        return arms[1]
    return arms[0] if difference.high < 0 else None


def verdict(
    difference: Estimate,
    arms: Sequence[str],
    taus: Sequence[float],
    *,
    seeds: int,
    prompts: int,
    level: float,
) -> str:
    """The comparison in words, and what they do not cover."""
    better = winner(difference, arms)
    interval = f"{level:.0%} interval {difference.low:+.3f} to {difference.high:+.3f}"
    if better is None:
        text = (
            f"No difference between {arms[0]} and {arms[1]} can be told: τ {taus[0]:.3f} and "
            f"{taus[1]:.3f}, difference {difference.value:+.3f} ({interval}) "
            f"over {prompts} prompts."
        )
    else:
        other = arms[0] if better == arms[1] else arms[1]
        values = dict(zip(arms, taus, strict=True))
        text = (
            f"{better} accepts more than {other}: τ {values[better]:.3f} against "
            f"{values[other]:.3f}, {arms[1]} minus {arms[0]} {difference.value:+.3f} "
            f"({interval}) over {prompts} prompts."
        )
    if seeds == 1:
        return (
            f"{text} Each was trained once: this speaks of these two checkpoints, "
            "not of the two ways to train."
        )
    return f"{text} Each was trained with {seeds} seeds, which the interval covers."


def speed_words(tau: float, timing: Mapping[str, Any]) -> tuple[str, str]:
    """Whether speculation pays, as one word and as a sentence.

    Faster or slower where the measured speed and τ against the break-even say the same; the two are
    measured on different prompts, so near the edge they may not.
    """
    speed, edge = timing["speedup"], timing["break_even_tau"]
    if speed > 1 and tau > edge:
        word = "faster"
    elif speed < 1 and tau < edge:
        word = "slower"
    else:
        word = "about as fast"
    than = "as" if word == "about as fast" else "than"
    return word, (
        f"{word} {than} no speculation: {speed:.2f} times its speed as measured, "
        f"τ {tau:.2f} at a break-even of {edge:.2f}"
    )


def _arm(runs: Runs, timing: Mapping[str, Any] | None, settings: CompareSettings) -> dict[str, Any]:
    merged = [item for prompts in runs for item in prompts]
    everything = summarise(merged)
    result: dict[str, Any] = {
        "tau": {
            name: asdict(
                length_interval(
                    counts_of(runs, name),
                    resamples=settings.resamples,
                    level=settings.level,
                    generator=generator("bootstrap", "arm", name),
                )
            )
            for name in by_benchmark(runs[0])
        },
        "tau_by_drafts": lengths_by_drafts(everything["per_position_unconditional"]),
    }
    if timing is not None:
        word, sentence = speed_words(everything["tau"], timing)
        best, speeds = best_drafts(
            everything["per_position_unconditional"], timing["verify_costs"], timing["c"]
        )
        result |= {
            "speedup": timing["speedup"],
            "break_even_tau": timing["break_even_tau"],
            "against_no_speculation": word,
            "words": sentence,
            "speedup_by_drafts": speeds,
            "recommended_k": best,
        }
    return result


def _check(runs: Mapping[str, Runs], arms: Sequence[str]) -> None:
    for name in arms:
        if name not in runs:
            raise HarnessError(
                "an arm to compare has no counts",
                where="compare.arms",
                rule=f"one of {', '.join(runs)}",
                got=name,
                fix="evaluate this arm, or take it out of compare.arms",
            )
    wanted = [item.id for item in sorted(runs[arms[0]][0], key=lambda item: item.id)]
    for name, seeds in runs.items():
        for prompts in seeds:
            found = sorted(item.id for item in prompts)
            if found != wanted:
                differing = sorted(set(found) ^ set(wanted))
                raise HarnessError(
                    "arms were counted on different prompts",
                    where=f"{arms[0]} and {name}",
                    rule="the same prompts, each once",
                    got=f"{len(differing)} of one only, such as {differing[:3]}",
                    fix="evaluate all arms on the same test states",
                )
        if name in arms and len(seeds) != len(runs[arms[0]]):
            raise HarnessError(
                "compared arms were trained with different numbers of seeds",
                where=f"{arms[0]} and {name}",
                rule=len(runs[arms[0]]),
                got=len(seeds),
                fix="train and evaluate each arm with the same seeds",
            )
