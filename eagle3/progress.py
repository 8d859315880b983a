"""How far a training run has come: its metrics, its best weights, and taking it up again.

Joins the values that a run carries from step to step to the files in its working folder. All ranks
call these alike; rank 0 writes. Knows nothing of data, losses or schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eagle3.optimizer import Optimizer, Trained
from eagle3.parallel import like, whole
from eagle3.ranks import Ranks
from eagle3.resume import (
    TrainingState,
    load_best,
    load_state,
    newest_good,
    save_best,
    save_state,
)
from eagle3.tracking import Tracker

log = logging.getLogger(__name__)
_MOMENT = "optimizer."


@dataclass
class Progress:
    """What changes from step to step besides weights.

    Attributes:
        step: optimizer steps done.
        best_step, best_tau: of the best replay on dev so far; `best_tau` is None before the first.
        history: (metric, step, value) of everything that repeats from run to run.
    """

    step: int = 0
    best_step: int = 0
    best_tau: float | None = None
    history: list[tuple[str, int, float]] = field(default_factory=list)

    def record(
        self,
        tracker: Tracker,
        metrics: Mapping[str, float],
        speed: Mapping[str, float] | None = None,
    ) -> None:
        """Into the history and to the tracker; speeds, which never repeat, to the tracker alone."""
        self.history += [(name, self.step, value) for name, value in metrics.items()]
        tracker.log_metrics({**metrics, **(speed or {})}, self.step)

    def last(self, metric: str) -> float | None:
        """The newest value of a metric."""
        return next((value for name, _, value in reversed(self.history) if name == metric), None)

    def evaluations_since_best(self) -> int:
        """How many replays on dev have not been above the best one since."""
        return sum(name == "dev_tau" and step > self.best_step for name, step, _ in self.history)


def keep_if_best(
    progress: Progress, tau: float, work: Path, trained: Trained, ranks: Ranks
) -> None:
    """Writes the weights of now where τ on dev is above all before.

    Raises:
        HarnessError: they could not be written.
    """
    if progress.best_tau is not None and tau <= progress.best_tau:
        return
    progress.best_step, progress.best_tau = progress.step, tau
    tensors = {name: whole(parameter) for name, parameter in trained.items()}
    ranks.on_leader(lambda: save_best(work, progress.step, tensors))


@torch.no_grad()
def restore_best(progress: Progress, work: Path, trained: Trained) -> None:
    """Puts the best weights back.

    Raises:
        HarnessError: they are gone or damaged.
    """
    best = load_best(work, progress.best_step)
    for name, parameter in trained.items():
        parameter.copy_(best[name])


def save_progress(
    work: Path,
    progress: Progress,
    trained: Trained,
    optimizer: Optimizer,
    keep_last: int,
    ranks: Ranks,
) -> None:
    """Writes all that the steps after this one depend on. The data's place and all random numbers
    are functions of the step, and the learning rate is too: none of them has a state.

    Raises:
        HarnessError: it could not be written; earlier states are intact.
    """
    tensors = {name: whole(parameter) for name, parameter in trained.items()}
    tensors |= {_MOMENT + name: value for name, value in optimizer.moments().items()}
    facts = {
        "best_step": progress.best_step,
        "best_tau": progress.best_tau,
        "history": progress.history,
    }
    state = TrainingState(progress.step, tensors, facts)
    ranks.on_leader(lambda: save_state(work, state, keep_last))


@torch.no_grad()
def take_up(work: Path, trained: Trained, optimizer: Optimizer, ranks: Ranks) -> Progress:
    """Where a killed run stood, its weights and moments put back; a new start without one.

    All ranks see the same working folder. The state knows nothing of their number.
    """
    step = ranks.on_leader(lambda: newest_good(work))
    if step is None:
        return Progress()
    state = load_state(work, step)
    for name, parameter in trained.items():
        parameter.copy_(like(state.tensors[name], parameter))
    optimizer.restore(
        {
            name.removeprefix(_MOMENT): value
            for name, value in state.tensors.items()
            if name.startswith(_MOMENT)
        }
    )
    log.info("resuming after step %d", state.step)
    history = [(str(name), int(step), float(value)) for name, step, value in state.facts["history"]]
    return Progress(state.step, state.facts["best_step"], state.facts["best_tau"], history)
