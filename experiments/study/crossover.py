"""`eagle3 study crossover`: how many tokens a head start is worth, by how far the sibling lies.

For someone who has a published drafter of a related model. Each budget is a training of its own,
its learning rate run down to the end, scored on dev answers. Other siblings than the pipeline's go
through the pipeline as overlays, up to their drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3.arm import first_drafter, init_digest
from eagle3.crossing import Crossing, crossing
from eagle3.errors import HarnessError
from eagle3.report.data import ReportData
from eagle3.seed_statistics import lengths_by_seed, paired_differences, t_interval
from eagle3.workspace import digest, write_atomically
from experiments.overlay import run_overlay
from experiments.study.bench import Bench
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
from experiments.study.publishing import publish, publish_pictures
from experiments.study.settings import CrossoverSettings
from experiments.study.side_by_side import about_queue, run_as_study
from experiments.study.training import length, score
from experiments.study.work import Place
from stages.params import dump_yaml

REPORT = Path("reports") / "crossover.json"


def run_crossover(root: Path, *, storage: str | None, workers: int = 1) -> None:
    """Makes the siblings' drafters, trains and writes `reports/crossover.json`.

    Raises:
        HarnessError: params.yaml says nothing of it, or something cannot be used.
    """
    bench = prepare(root)
    settings = bench.study.crossover
    if settings is None:
        raise HarnessError(
            "settings lack a part",
            where=bench.params_path,
            rule="study.crossover: arms, budgets, and siblings",
            got="no study.crossover",
            fix="take the part over from the project's params.yaml",
        )
    arm = bench.arm(settings.finetune)
    for each in (bench.arm(settings.scratch), arm):
        bench.check_start(each)
    check_answers(bench, arm, "dev")
    place = reach(bench, storage)
    starts = {bits: _checkpoint(bench, settings, bits) for bits in settings.bits}
    for start in starts.values():
        bench.check_start(replace(arm, init=start))
    queue = open_queue(place, settings, starts)
    about = (
        "How many tokens is a head start worth? From scratch beside finetuned from drafters of "
        f"siblings of {', '.join(map(str, settings.bits))} bits, at "
        f"{', '.join(f'{tokens:,}' for tokens in settings.tokens)} tokens, {settings.seeds} seeds "
        "each; τ on dev answers."
    )
    with run_as_study(place, queue, about, workers=workers) as (tracker, note):
        found = mapped(queue, bench, settings, starts) | about_queue(queue, arm)
        publish(root / REPORT, found, tracker)
        publish_pictures(root / REPORT, ReportData(crossover=found), tracker, "Crossover map")
        lines = [f"sibling of {bits} bits: {it['words']}" for bits, it in found["siblings"].items()]
        note.tell("\n\n".join(lines))
    for line in lines:
        say(line)
    say(f"{REPORT} written")


def open_queue(place: Place, settings: CrossoverSettings, starts: Mapping[int, Path]) -> Fixed:
    """One training for each seed, budget and curve, budgets of one seed side by side."""
    bench = place.bench
    slots = []
    for seed in bench.seeds(settings.seeds):
        for tokens in settings.tokens:
            for bits in (None, *settings.bits):
                arm = bench.arm(settings.scratch if bits is None else settings.finetune)
                shape = arm.settings({})
                cost = cost_of(tokens, arm.data.lengths, arm.supervised, shape, seed)
                more: dict[str, Any] = {"bits": bits}
                if bits is not None:
                    more["init"] = str(starts[bits].relative_to(bench.root))
                title = f"{curve_name(bits)}, {tokens:,} tokens, seed {seed}"
                slots.append(
                    slot(
                        title, arm.name, seed=seed, tokens=tokens, cost=cost,
                        train=arm.changes, **more,
                    )
                )  # fmt: skip
    facts = {
        "scratch": bench.facts(bench.arm(settings.scratch)),
        "finetune": bench.facts(bench.arm(settings.finetune)),
        "starts": {str(bits): init_digest(start) for bits, start in starts.items()},
        "tokens": settings.tokens,
    }
    return open_fixed(place, f"crossover-{digest(facts)[:8]}", facts, slots, "dev")


def curve_name(bits: int | None) -> str:
    """A curve's name for people."""
    return "scratch" if bits is None else f"finetune, {bits}-bit sibling"


def mapped(
    queue: Fixed, bench: Bench, settings: CrossoverSettings, starts: Mapping[int, Path]
) -> dict[str, Any]:
    """Curves and crossings from finished trainings, as plain values."""
    runs = {
        (bits, tokens): counts_of(complete(queue.study, bits=bits, tokens=tokens))
        for bits in (None, *settings.bits)
        for tokens in settings.tokens
    }
    curves: dict[str, Any] = {}
    for bits in (None, *settings.bits):
        curves[curve_name(bits)] = [
            {"tokens": tokens, **asdict(t_interval(values, LEVEL)), "by_seed": values}
            for tokens in settings.tokens
            for values in [lengths_by_seed(runs[bits, tokens])]
        ]
    siblings = {}
    for bits in settings.bits:
        differences = [
            paired_differences(runs[bits, tokens], runs[None, tokens]) for tokens in settings.tokens
        ]
        found = crossing(settings.tokens, differences, LEVEL)
        siblings[str(bits)] = {
            "start_tau": _start_tau(bench, settings, starts[bits]),
            "differences": differences,
            **asdict(found),
            "words": words(found, settings.tokens),
        }
    return {
        "level": LEVEL,
        "seeds": settings.seeds,
        "prompts": runs[None, settings.tokens[0]].steps_SP.shape[1],
        "tokens": settings.tokens,
        "curves": curves,
        "siblings": siblings,
    }


def words(found: Crossing, tokens: list[int]) -> str:
    """A crossing in a sentence."""
    last = f"{tokens[-1]:,}"
    if found.at is None:
        start = f"from scratch does not overtake finetuning within {last} tokens"
    elif found.at == 0.0:
        start = f"from scratch is ahead from {tokens[0]:,} tokens on"
    else:
        start = f"from scratch overtakes finetuning at about {found.at:,.0f} tokens"
    low = f"below {tokens[0]:,}" if found.low == 0.0 else _count(found.low, last)
    high = f"below {tokens[0]:,}" if found.high == 0.0 else _count(found.high, last)
    return f"{start} ({LEVEL:.0%} interval: {low if low == high else f'{low} to {high}'})"


def _count(value: float | None, last: str) -> str:
    return f"above {last}" if value is None else f"{value:,.0f}"


def _start_tau(bench: Bench, settings: CrossoverSettings, start: Path) -> float:
    """τ on dev of the checkpoint as it is."""
    arm = bench.arm(settings.finetune)
    drafter = first_drafter(start, arm.data, arm.settings({}), bench.run.seed)
    return length(score(drafter, arm.data.dev, bench.evaluate.k, bench.evaluate.dtype))


def _checkpoint(bench: Bench, settings: CrossoverSettings, bits: int) -> Path:
    """The drafter trained on the sibling of so many bits, made if it is not there."""
    if bench.params["sibling"]["bits"] == bits:
        return bench.arm(settings.finetune).init
    overlay = bench.root / ".work" / "crossover" / f"sibling-{bits}bit.yaml"
    write_atomically(overlay, dump_yaml({"sibling": {"bits": bits}}))
    code = run_overlay(bench.root, overlay, targets=[f"train@{settings.base}"])
    if code != 0:
        raise HarnessError(
            "a sibling's drafter could not be made",
            where=overlay,
            rule=f"train@{settings.base} to its end",
            got=f"dvc's exit code {code}",
            fix="its messages above say why; the same command goes on from there",
        )
    return bench.root / ".work" / "overlays" / overlay.stem / "checkpoints" / settings.base
