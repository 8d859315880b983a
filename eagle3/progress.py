"""How far a training run has come: its metrics, its best weights, and taking it up again.

Joins the values that a run carries from step to step to the files in its working folder. Knows
nothing of data, losses or schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3.resume import (
    TrainingState,
    newest_state,
    optimizer_tensors,
    restore_optimizer,
    save_state,
)
from eagle3.tracking import Tracker

log = logging.getLogger(__name__)
BEST = "best.safetensors"
Trained = Mapping[str, torch.nn.Parameter]


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


def keep_if_best(progress: Progress, tau: float, work: Path, trained: Trained) -> None:
    """Writes the weights of now where τ on dev is above all before."""
    if progress.best_tau is not None and tau <= progress.best_tau:
        return
    progress.best_step, progress.best_tau = progress.step, tau
    part = work / f".{BEST}.part"
    save_file({name: parameter.detach() for name, parameter in trained.items()}, part)
    part.replace(work / BEST)


@torch.no_grad()
def restore_best(work: Path, trained: Trained) -> None:
    """Puts the best weights back."""
    best = load_file(work / BEST)
    for name, parameter in trained.items():
        parameter.copy_(best[name])


def save_progress(
    work: Path, progress: Progress, trained: Trained, optimizer: torch.optim.Optimizer
) -> None:
    """Writes all that the steps after this one depend on.

    Raises:
        HarnessError: it could not be written; earlier states are intact.
    """
    tensors = {name: parameter.detach() for name, parameter in trained.items()}
    tensors |= optimizer_tensors(optimizer, list(trained))
    facts = {
        "best_step": progress.best_step,
        "best_tau": progress.best_tau,
        "history": progress.history,
    }
    save_state(work, TrainingState(progress.step, tensors, facts))


@torch.no_grad()
def take_up(work: Path, trained: Trained, optimizer: torch.optim.Optimizer) -> Progress:
    """Where a killed run stood, its weights and moments put back; a new start without one."""
    state = newest_state(work)
    if state is None:
        return Progress()
    for name, parameter in trained.items():
        parameter.copy_(state.tensors[name])
    restore_optimizer(optimizer, list(trained), state.tensors)
    log.info("resuming after step %d", state.step)
    history = [(str(name), int(step), float(value)) for name, step, value in state.facts["history"]]
    return Progress(state.step, state.facts["best_step"], state.facts["best_tau"], history)
