"""`eagle3 scaling`: what more data would bring, from trainings on nested parts of what there is.

The draft vocabulary is that of all the data for every part, as the recipe is. Each training is a
run in MLflow below the study's own, and is scored on test answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from eagle3.errors import HarnessError
from eagle3.scaling import Law, fit, predict, predict_mean, size_for
from eagle3.seed_statistics import lengths_by_seed, t_interval
from eagle3.seeding import generator
from eagle3.settings import read_settings
from eagle3.workspace import digest
from experiments.study.bench import Bench, BenchArm
from experiments.study.budget import cost_of
from experiments.study.compare import LEVEL
from experiments.study.fixed import (
    Fixed,
    check_answers,
    complete,
    counts_of,
    open_fixed,
    slot,
)
from experiments.study.opening import prepare, reach
from experiments.study.progress import say
from experiments.study.publishing import publish
from experiments.study.settings import ScalingSettings
from experiments.study.side_by_side import about_queue, run_as_study
from experiments.study.work import Place
from stages.params import section_values

REPORT = Path("reports") / "scaling.json"
DRAWS = 20_000
TIMES = (2, 10)  # as much data as there is
WIDE = 0.15  # τ; an interval wider than this tells nothing that one could act on


def run_scaling(root: Path, *, storage: str | None, workers: int, target: float | None) -> None:
    """Trains, fits and writes `reports/scaling.json`; taken up where it was stopped.

    Raises:
        HarnessError: something cannot be used, or τ does not rise with the data.
    """
    bench = prepare(root)
    values = section_values(bench.params, "scaling", where=bench.params_path)
    if target is not None:
        values = {**values, "target": target}
    settings = read_settings(ScalingSettings, values, where=f"{bench.params_path}, scaling")
    arm = bench.arm(settings.arm)
    bench.check_start(arm)
    check_answers(bench, arm, "test")
    place = reach(bench, storage)
    queue = open_queue(place, settings, arm)
    about = (
        f"What would more data bring? {arm.name} on {', '.join(map(name_of, settings.parts))}, "
        f"{settings.seeds} seeds each; τ on test answers."
    )
    with run_as_study(place, queue, about, workers=workers) as (tracker, note):
        found = fitted(queue, bench, settings)
        found |= about_queue(queue, arm, scaling=settings.model_dump(mode="json"))
        publish(root / REPORT, found, tracker)
        note.tell("\n\n".join(found["words"]))
    for line in found["words"]:
        print(line)
    say(f"{REPORT} written")


def rows_of(settings: ScalingSettings, part: int, all_rows: int) -> int:
    """Training budget on one part in so many."""
    return round(settings.passes * all_rows / part * part**settings.growth)


def open_queue(place: Place, settings: ScalingSettings, arm: BenchArm) -> Fixed:
    """One training for each seed and part."""
    bench = place.bench
    train = {**arm.changes, "evaluations": settings.evaluations}
    shape, all_rows = arm.settings(train), sum(arm.data.lengths)
    slots = []
    for seed in bench.seeds(settings.seeds):
        for part in settings.parts:
            some, tokens = arm.on_part(1 / part, seed), rows_of(settings, part, all_rows)
            cost = cost_of(tokens, some.data.lengths, some.supervised, shape, seed)
            title = f"{arm.name} on {name_of(part)}, seed {seed}"
            slots.append(
                slot(
                    title, arm.name, seed=seed, tokens=tokens, cost=cost, train=train,
                    part=[1 / part, seed], one_in=part, data_tokens=sum(some.data.lengths),
                    documents=len(some.data.lengths),
                )
            )  # fmt: skip
    facts = {
        **bench.facts(arm, test=True),
        "scaling": settings.model_dump(exclude={"target", "seeds"}),
    }
    return open_fixed(place, f"scaling-{digest(facts)[:8]}", facts, slots, "test")


def name_of(part: int) -> str:
    """A part for people."""
    return "all data" if part == 1 else f"1/{part} of the data"


def fitted(queue: Fixed, bench: Bench, settings: ScalingSettings) -> dict[str, Any]:
    """Points, the check on all the data, and what is foretold of more, as plain values."""
    seeds = bench.seeds(settings.seeds)
    runs = {
        part: [t for t in complete(queue.study, one_in=part) if t.user_attrs["seed"] in seeds]
        for part in settings.parts
    }
    points = [_point(part, trials) for part, trials in runs.items()]
    most = 1.0 + bench.evaluate.k
    key = str(bench.study.seed)
    try:
        half = _law([p for p in points if p["share"] <= 0.5], most, f"half {key}")
        law = _law(points, most, f"all {key}")
    except ValueError as error:
        raise HarnessError(
            "no law can be fitted",
            where=queue.study.study_name,
            rule="τ that rises with the data",
            got=f"{error}; τ {', '.join(format(p['value'], '.3f') for p in points)}",
            fix="more seeds, or a recipe that does not overfit",
        ) from None
    whole = points[-1]
    check = predict_mean(
        half, whole["tokens"], settings.seeds, level=LEVEL, generator=generator("check", key)
    )
    made: dict[str, Any] = {
        "level": LEVEL,
        "arm": settings.arm,
        "seeds": settings.seeds,
        "prompts": len(runs[1][0].user_attrs["counts"]),
        "points": points,
        "predicted": check.value,
        "low": check.low,
        "high": check.high,
        "measured": whole["value"],
        "more": [
            {"times": times, "tokens": times * whole["tokens"]}
            | asdict(predict(law, times * whole["tokens"], level=LEVEL))
            for times in TIMES
        ],
        "target": {"tau": settings.target} | asdict(size_for(law, settings.target, level=LEVEL)),
        "curve": _curve(law, points[0]["tokens"], TIMES[-1] * whole["tokens"]),
    }
    made["words"] = words(made)
    return made


def words(found: dict[str, Any]) -> list[str]:
    """What was found, in sentences."""
    level, inside = f"{found['level']:.0%}", found["low"] <= found["measured"] <= found["high"]
    said = [
        f"From up to half of the data τ {found['predicted']:.3f} was foretold for all of it "
        f"({level} interval {found['low']:.3f} to {found['high']:.3f}); measured "
        f"{found['measured']:.3f}, {'inside' if inside else 'outside'}."
    ]
    for item in found["more"]:
        told = (
            f"With {item['times']} times the data ({item['tokens']:,.0f} tokens): τ "
            f"{item['value']:.3f} ({item['low']:.3f} to {item['high']:.3f})"
        )
        if item["high"] - item["low"] > WIDE:
            told += ". The points do not tell this surely enough to act on"
        said.append(f"{told}.")
    said.append(_target(found))
    rising = [name_of(p["one_in"]) for p in found["points"] if p["still_rising"]]
    if rising:
        said.append(
            f"Dev τ was still rising at the end on {', '.join(rising)}: more passes there would "
            "give more, and the law speaks of this recipe."
        )
    return said


def _target(found: dict[str, Any]) -> str:
    target, have = found["target"], found["points"][-1]["tokens"]
    name = f"τ {target['tau']:.2f}"
    if target["value"] is None:
        return (
            f"{name} is not reached by more data alone, as far as the points tell (chance "
            f"{target['chance']:.0%})."
        )
    told = f"{name} takes about {target['value']:,.0f} tokens, {target['value'] / have:.1f} times"
    high = "without an end" if target["high"] is None else f"{target['high']:,.0f}"
    told += f" what there is ({found['level']:.0%} interval {target['low']:,.0f} to {high})"
    if target["high"] is None or target["high"] > 10 * target["low"]:
        told += ". The points do not tell this surely enough to act on"
    return f"{told}."


def _law(points: Sequence[dict[str, Any]], most: float, key: str) -> Law:
    sizes = [point["tokens"] for point in points for _ in point["by_seed"]]
    values = [value for point in points for value in point["by_seed"]]
    return fit(sizes, values, most=most, draws=DRAWS, generator=generator("scaling", key))


def _point(part: int, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    values = lengths_by_seed(counts_of(trials))
    about = [trial.user_attrs for trial in trials]
    return {
        "share": 1 / part,
        "one_in": part,
        "documents": about[0]["documents"],
        "tokens": sum(item["data_tokens"] for item in about) / len(about),
        "trained_tokens": about[0]["tokens"],
        **asdict(t_interval(values, LEVEL)),
        "by_seed": values,
        "dev_tau": [item["dev_tau"] for item in about],
        "best_at": [item["best_at"] for item in about],
        "still_rising": sum(item["best_at"] == 1.0 for item in about) > len(about) / 2,
    }


def _curve(law: Law, first: float, last: float) -> list[dict[str, float]]:
    """The law between two sizes, for the picture."""
    steps = 24
    sizes = [first * (last / first) ** (step / steps) for step in range(steps + 1)]
    return [{"tokens": size, **asdict(predict(law, size, level=LEVEL))} for size in sizes]
