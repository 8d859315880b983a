"""The winners of both arms, trained again with several seeds and scored on held-out prompts.

The seed is the unit: see `eagle3.seed_statistics`. Seeds of the comparison are not the search's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from optuna.trial import FrozenTrial

from eagle3.acceptance import ALL
from eagle3.comparison import verdict, winner
from eagle3.seed_statistics import (
    deviation,
    difference_components,
    lengths_by_seed,
    paired_differences,
    power,
    prompts_needed,
    seeds_needed,
    t_interval,
)
from eagle3.workspace import digest
from experiments.study.bench import BenchArm
from experiments.study.budget import cost_of
from experiments.study.fixed import (
    Fixed,
    benchmarks_of,
    complete,
    counts_of,
    open_fixed,
    slot,
)
from experiments.study.search import Search, best_trial
from experiments.study.store import Slot
from experiments.study.work import Place

EQUAL, LARGER = "equal budget", "larger budget"
LEVEL = 0.95


def open_compare(place: Place, searches: Sequence[Search]) -> Fixed:
    """The queue of the winners' trainings. Other winners have a queue of their own."""
    bench = place.bench
    winners = {}
    for search in searches:
        best = best_trial(search.study)
        assert best is not None
        winners[search.arm.name] = best
    slots = [
        _slot(search.arm, winners[search.arm.name], seed, EQUAL, 0)
        for seed in bench.seeds(bench.study.compare.seeds)
        for search in searches
    ]
    larger = larger_budget(searches)
    if larger is not None:
        search, more = larger
        slots += [
            _slot(search.arm, winners[search.arm.name], seed, LARGER, more)
            for seed in bench.seeds(bench.study.compare.larger_seeds)
        ]
    facts = {
        search.arm.name: {
            **bench.facts(search.arm, test=True),
            "winner": {
                name: winners[search.arm.name].user_attrs[name] for name in ("train", "tokens")
            },
        }
        for search in searches
    }
    name = f"compare-{digest([facts, str(larger and larger[1])])[:8]}"
    return open_fixed(place, name, facts, slots, "test")


def larger_budget(searches: Sequence[Search]) -> tuple[Search, int] | None:
    """The arm from scratch, and the rows that the finetuned checkpoint had before; None where
    there are not both arms, or where nobody knows."""
    scratch = [search for search in searches if search.arm.init.is_file()]
    finetune = [search for search in searches if not search.arm.init.is_file()]
    if not scratch or not finetune:
        return None
    known = checkpoint_tokens(finetune[0])
    return None if known is None else (scratch[0], known)


def checkpoint_tokens(search: Search) -> int | None:
    """Training rows of the checkpoint that an arm starts from."""
    bench = search.bench
    if bench.study.compare.checkpoint_tokens is not None:
        return bench.study.compare.checkpoint_tokens
    maker = bench.maker_of(search.arm.init)
    return None if maker is None else maker.tokens


def _slot(arm: BenchArm, best: FrozenTrial, seed: int, role: str, more_tokens: int) -> Slot:
    train, tokens = best.user_attrs["train"], best.user_attrs["tokens"] + more_tokens
    settings = arm.settings(train)
    cost = cost_of(tokens, arm.data.lengths, arm.supervised, settings, seed)
    title = f"{arm.name} {role}, seed {seed}"
    return slot(title, arm.name, seed=seed, tokens=tokens, cost=cost, train=train, role=role)


def result(queue: Fixed, searches: Sequence[Search]) -> dict[str, Any]:
    """What the comparison says, as plain values; only once all its slots are finished."""
    bench = queue.bench
    settings = bench.study.compare
    names = [search.arm.name for search in searches]
    runs = {name: complete(queue.study, arm=name, role=EQUAL) for name in names}
    made: dict[str, Any] = {
        "level": LEVEL,
        "seeds": settings.seeds,
        "prompts": len(runs[names[0]][0].user_attrs["counts"]),
        "arms": {name: _arm(runs[name]) for name in names},
    }
    rows = [_row(name, runs[name], "as found by the search") for name in names]
    larger = larger_budget(searches)
    if larger is not None and settings.larger_seeds:
        search, more = larger
        big = complete(queue.study, arm=search.arm.name, role=LARGER)
        text = f"the same settings on {more:,} rows more, which the checkpoint had"
        rows.append(_row(f"{search.arm.name}, larger budget", big, text))
    for search in searches:
        if not search.arm.init.is_file():
            rows.append(_checkpoint_row(search))
    made["costs"] = rows
    if len(names) == 2:
        made |= _difference(runs[names[0]], runs[names[1]], names, settings)
    return made


def _difference(
    first: Sequence[FrozenTrial], second: Sequence[FrozenTrial], names: list[str], settings: Any
) -> dict[str, Any]:
    by_benchmark = {}
    for benchmark in benchmarks_of(first[0]):
        one, two = counts_of(first, benchmark), counts_of(second, benchmark)
        differences = paired_differences(one, two)
        sd = deviation(differences)
        parts = difference_components(one, two)
        by_benchmark[benchmark] = {
            **asdict(t_interval(differences, LEVEL)),
            "differences": differences,
            "sd": sd,
            "effect_size": sum(differences) / len(differences) / sd if sd else None,
            "components": asdict(parts),
            "power": power(settings.effect, sd, settings.seeds, LEVEL),
            "seeds_needed": seeds_needed(settings.effect, sd, level=LEVEL, wanted=settings.power),
            "prompts_needed": prompts_needed(
                settings.effect, parts, settings.seeds, level=LEVEL, wanted=settings.power
            ),
        }
    overall = by_benchmark[ALL]
    interval = t_interval(overall["differences"], LEVEL)
    taus = [sum(lengths_by_seed(counts_of(runs))) / len(runs) for runs in (first, second)]
    return {
        "compared": names,
        "delta": interval.value,
        "low": interval.low,
        "high": interval.high,
        "winner": winner(interval, names),
        "verdict": verdict(
            interval,
            names,
            taus,
            seeds=settings.seeds,
            prompts=len(first[0].user_attrs["counts"]),
            level=LEVEL,
        ),
        "effect": settings.effect,
        "wanted_power": settings.power,
        "by_benchmark": by_benchmark,
    }


def _arm(trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    made = {}
    for benchmark in benchmarks_of(trials[0]):
        values = lengths_by_seed(counts_of(trials, benchmark))
        made[benchmark] = {**asdict(t_interval(values, LEVEL)), "by_seed": values}
    return made


def _row(name: str, trials: Sequence[FrozenTrial], text: str) -> dict[str, Any]:
    values = lengths_by_seed(counts_of(trials))
    mean = sum(values) / len(values)
    return {
        "name": name,
        "what": text,
        "tokens": trials[0].user_attrs["tokens"],
        "cost": trials[0].user_attrs["cost"],
        "seconds": sum(trial.user_attrs["run_seconds"] for trial in trials) / len(trials),
        "seeds": len(trials),
        "tau": mean,
        "half": t_interval(values, LEVEL).high - mean if len(values) > 1 else None,
    }


def _checkpoint_row(search: Search) -> dict[str, Any]:
    return {
        "name": f"what {search.arm.name} starts from",
        "what": "trained before, on its own data; paid once, by whoever made it",
        "tokens": checkpoint_tokens(search),
        "cost": None,
        "seconds": None,
        "seeds": None,
        "tau": None,
        "half": None,
    }
