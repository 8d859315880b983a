"""Working through slots: take one, train, say what came of it, until none is left.

The same for all kinds of slots; what a slot means is the business of the `Kind`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
import torch
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from eagle3.finite import LossNotFinite
from eagle3.tracking import Tracker, flatten
from eagle3.train_settings import TrainSettings
from experiments.study.bench import Bench, BenchArm
from experiments.study.origin import tell_origin
from experiments.study.store import alive, claim, hand_back, running, tell
from experiments.study.tracking import PARENT, child_run
from experiments.study.training import GivenUp
from stages import notes

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # while slots are at work elsewhere
NOTHING_ACCEPTED = 1.0  # τ of a drafter that left the numbers


class Kind(Protocol):
    """What the slots of a study are: how one is run, and what it is called."""

    @property
    def study(self) -> optuna.Study:
        """Where they are."""

    @property
    def answers(self) -> str:
        """Which ones τ is measured on."""

    def run(self, trial: optuna.Trial, tracker: Tracker) -> float:
        """Its τ. Raises GivenUp."""

    def name(self, trial: optuna.Trial) -> str:
        """For people."""

    def words(self, trial: optuna.Trial) -> str:
        """What is trained on what, in a sentence or two; of a slot that was begun."""


class Listener(Protocol):
    """Told when a slot begins and ends."""

    def began(self, kind: Kind, trial: optuna.Trial) -> None: ...

    def update(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where workers work.

    Attributes:
        until: `time.monotonic()` after which no slot is begun.
    """

    bench: Bench
    storage: RDBStorage
    url: str
    until: float | None = None

    @property
    def over(self) -> bool:
        """Whether the outer limit has come."""
        return self.until is not None and time.monotonic() > self.until


def work_through(place: Place, kinds: Sequence[Kind], listener: Listener) -> None:
    """Runs slots until none waits or is at work elsewhere, or the time is up.

    Studies with the most slots left come first, so that arms go on side by side.

    Raises:
        KeyboardInterrupt: the slot at work was put back.
    """
    while not place.over:
        for kind in sorted(kinds, key=_waiting, reverse=True):
            trial = claim(kind.study, place.storage, place.url)
            if trial is not None:
                _run(place, kind, trial, listener)
                break
        else:
            if not any(running(kind.study) for kind in kinds):
                return
            time.sleep(POLL_SECONDS)
            listener.update()


def _waiting(kind: Kind) -> int:
    return len(kind.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


def _run(place: Place, kind: Kind, trial: optuna.Trial, listener: Listener) -> None:
    value: float | None = None
    state = TrialState.COMPLETE
    listener.began(kind, trial)
    started = time.perf_counter()
    tags = {"study": kind.study.study_name, "trial": str(trial.number)}
    parent = kind.study.user_attrs.get(PARENT)
    try:
        with (
            alive(place.storage, trial),
            child_run(place.bench.root, kind.name(trial), parent, tags) as tracker,
        ):
            tell_origin(tracker, place.bench, kind.study, threads=torch.get_num_threads())
            try:
                value = kind.run(trial, tracker)
                tracker.log_metrics({"tau": value}, 0)
                came_to = f"**τ {value:.3f}** on {kind.answers} answers."
            except GivenUp:
                state = TrialState.PRUNED
                tracker.log_tags({"given_up": "true"})
                came_to = f"Given up after {trial.user_attrs['share']:.0%} of its budget."
            except LossNotFinite as error:
                value = NOTHING_ACCEPTED
                trial.set_user_attr("diverged", True)
                tracker.log_tags({"diverged": str(error)})
                came_to = "Its loss left the numbers: it counts as if nothing were accepted."
            tracker.log_tags({notes.TAG: f"{kind.words(trial)}\n\n{came_to}"})
            trial.set_user_attr("run_seconds", round(time.perf_counter() - started, 3))
            ended = tell(kind.study, trial, value, state)
            if not ended:
                tracker.log_tags({"taken_over": "true"})
    except BaseException:
        # Ctrl-C, a full disk, a mistake: the slot is for whoever comes next.
        hand_back(kind.study, trial, place.url)
        raise
    listener.update()


def log_settings(tracker: Tracker, settings: Any, said: str, **more: Any) -> None:
    """Settings of a training as the run's parameters, and in words."""
    tracker.log_params({**flatten(settings.model_dump()), **more})
    tracker.log_tags({notes.TAG: said})


def training_words(bench: Bench, arm: BenchArm, settings: TrainSettings, tokens: int) -> str:
    """What is trained on what."""
    init = arm.init.relative_to(bench.root) if arm.init.is_relative_to(bench.root) else arm.init
    return notes.Training(
        name=arm.name,
        init=None if arm.init.is_file() else init,
        verifier=arm.data.meta.verifier,
        states=Path(arm.entry.states),
        documents=len(arm.data.lengths),
        budget=notes.budget(tokens, None),
        lr=settings.lr,
        ttt_steps=settings.objective.ttt_steps,
    ).begun()
