"""`eagle3 study aa`: does the comparison call equal recipes different as rarely as it says?

Short trainings of one recipe give the variances; `eagle3.aa_test` simulates comparisons from them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3.aa_test import called_different
from eagle3.errors import HarnessError
from eagle3.seed_statistics import components, lengths_by_seed
from eagle3.seeding import generator
from eagle3.statistics import overall_length
from eagle3.workspace import digest
from experiments.study.bench import Bench, BenchArm
from experiments.study.budget import tokens_for
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
from experiments.study.settings import AaSettings
from experiments.study.side_by_side import about_queue, run_as_study
from experiments.study.work import Place

REPORT = Path("reports") / "aa_test.json"


def run_aa(root: Path, *, storage: str | None, workers: int = 1) -> None:
    """Trains, simulates and writes `reports/aa_test.json`; taken up where it was stopped.

    Raises:
        HarnessError: params.yaml says nothing of a calibration, or something cannot be used.
    """
    bench = prepare(root)
    settings = bench.study.aa
    if settings is None:
        raise HarnessError(
            "settings lack a part",
            where=bench.params_path,
            rule="study.aa: what is compared, and how often",
            got="no study.aa",
            fix="take the part over from the project's params.yaml",
        )
    arm = bench.arm(settings.arm)
    bench.check_start(arm)
    check_answers(bench, arm, "test")
    place = reach(bench, storage)
    queue = open_queue(place, settings, arm)
    about = (
        f"Does the comparison call equal recipes different as rarely as it says? {arm.name}, "
        f"trained with {settings.seeds} seeds, each on {settings.cost:,} supervised rows × TTT "
        "steps; comparisons are simulated from the spread of its τ on test answers."
    )
    with run_as_study(place, queue, about, workers=workers) as (tracker, note):
        found = calibrated(queue, bench, settings) | about_queue(queue, arm)
        publish(root / REPORT, found, tracker)
        words = (
            f"{found['rejected_share']:.1%} of {found['simulations']} equal pairs called "
            f"different, {found['power_at_0.05']:.0%} of those 0.05 apart"
        )
        note.tell(f"{words}.")
    say(f"{REPORT}: {words}")


def open_queue(place: Place, settings: AaSettings, arm: BenchArm) -> Fixed:
    """One training for each seed."""
    bench, shape = place.bench, arm.settings({})
    slots = []
    for seed in bench.seeds(settings.seeds):
        tokens, cost = tokens_for(settings.cost, arm.data.lengths, arm.supervised, shape, seed)
        title = f"A/A {arm.name}, seed {seed}"
        slots.append(slot(title, arm.name, seed=seed, tokens=tokens, cost=cost, train=arm.changes))
    facts = {**bench.facts(arm, test=True), "cost": settings.cost}
    return open_fixed(place, f"aa-{digest(facts)[:8]}", facts, slots, "test")


def calibrated(queue: Fixed, bench: Bench, settings: AaSettings) -> dict[str, Any]:
    """The simulation from finished trainings, as plain values."""
    counts = counts_of(complete(queue.study)[: settings.seeds])
    found, tau = components(counts), overall_length(counts)
    steps_P = counts.steps_SP.mean(0)

    def share(effect: float) -> float:
        return called_different(
            found,
            steps_P,
            tau,
            effect=effect,
            seeds=bench.study.compare.seeds,
            simulations=settings.simulations,
            level=LEVEL,
            generator=generator("aa", bench.study.seed, str(effect)),
        )

    return {
        "simulations": settings.simulations,
        "rejected_share": share(0.0),
        "power_at_0.05": share(0.05),
        "seeds": bench.study.compare.seeds,
        "trained_seeds": settings.seeds,
        "arm": settings.arm,
        "tokens": complete(queue.study)[0].user_attrs["tokens"],
        "prompts": counts.steps_SP.shape[1],
        "level": LEVEL,
        "tau": tau,
        "tau_by_seed": lengths_by_seed(counts),
        "components": asdict(found),
        "sd_of_a_training": float(torch.tensor(lengths_by_seed(counts)).double().std()),
    }
