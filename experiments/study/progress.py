"""What people see of a study while it runs: a line as each slot ends, and its MLflow run.

Reads the store alone, so it shows what all workers do, on whatever machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from eagle3.report import words
from eagle3.tracking import Tracker
from experiments.study.search import Search, best_trial
from experiments.study.store import SLOT, finished
from experiments.study.work import Kind


class Board:
    """Shows slots as they end, with the best so far and the time left.

    Args:
        ahead: cost of what comes after these slots, for the time left.
        workers: how many work on them here.
        changed: called at the beginning and when slots have ended.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        tracker: Tracker,
        *,
        ahead: int = 0,
        workers: int = 1,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._kinds = kinds
        self._tracker = tracker
        self._ahead = ahead
        self._workers = workers
        self._changed = changed
        self._shown = {(k.study.study_name, t.number) for k in kinds for t in finished(k.study)}
        if self._shown:
            say(f"taken up: {len(self._shown)} finished before")
        self._log()

    def began(self, kind: Kind, trial: optuna.Trial) -> None:
        """Says what is at work now."""
        say(f"{kind.name(trial)} begins")

    def update(self) -> None:
        """Shows what has ended since the last call."""
        new = False
        for kind in self._kinds:
            for trial in finished(kind.study):
                key = (kind.study.study_name, trial.number)
                if key in self._shown:
                    continue
                self._shown.add(key)
                new = True
                say(f"{_line(kind, trial)} · {self._left()}")
        if new:
            self._log()

    def _left(self) -> str:
        spent = seconds = waiting = 0.0
        for kind in self._kinds:
            for trial in kind.study.get_trials(deepcopy=False):
                cost = float(trial.user_attrs.get("cost", _cost(kind)))
                if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                    spent += cost * trial.user_attrs.get("share", 1.0)
                    seconds += trial.user_attrs.get("run_seconds", 0.0)
                elif trial.state != TrialState.FAIL:
                    waiting += cost
        if not spent:
            return ""
        left = seconds / spent * (waiting + self._ahead) / self._workers
        return f"about {words.duration(left)} left"

    def _log(self) -> None:
        """Best so far against cost, for each arm; the tracker drops what it was told before."""
        self._changed()
        for kind in self._kinds:
            if not isinstance(kind, Search):
                continue
            best, cost = 0.0, 0.0
            for trial in finished(kind.study):
                cost += trial.user_attrs["cost"] * trial.user_attrs.get("share", 1.0)
                if trial.state == TrialState.COMPLETE and trial.value is not None:
                    best = max(best, trial.value)
                    self._tracker.log_metrics({f"best_dev_tau.{kind.arm.name}": best}, int(cost))


def seconds_of(*studies: optuna.Study) -> float:
    """Wall time in which at least one training of them ran; trainings side by side count once."""
    spans = sorted(
        (trial.datetime_start, trial.datetime_complete)
        for study in studies
        for trial in study.get_trials(deepcopy=False)
        if trial.datetime_start and trial.datetime_complete
    )
    seconds, until = 0.0, None
    for start, end in spans:
        since = start if until is None else max(start, until)
        seconds += max((end - since).total_seconds(), 0.0)
        until = end if until is None else max(end, until)
    return seconds


def say(text: str) -> None:
    """A line above the bar of the training that runs."""
    tqdm.write(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)


def _line(kind: Kind, trial: FrozenTrial) -> str:
    value = "–" if trial.value is None else f"{trial.value:.4f}"
    if not isinstance(kind, Search):
        return f"{trial.user_attrs['title']}: τ {value}"
    slots = len({t.user_attrs.get(SLOT) for t in kind.study.get_trials(deepcopy=False)})
    ended = len(finished(kind.study))
    how = f"dev τ {value}"
    if trial.state == TrialState.PRUNED:
        how = f"given up after {trial.user_attrs.get('share', 0):.0%} (τ {value} on few prompts)"
    elif trial.user_attrs.get("diverged"):
        how = "left the numbers"
    best = best_trial(kind.study)
    so_far = "" if best is None else f" · best {best.value:.4f} (trial {best.user_attrs[SLOT]})"
    return (
        f"{kind.arm.name} trial {trial.user_attrs[SLOT]}, {ended} of {slots}: {how}"
        f" with {words.settings(trial.params)}{so_far}"
    )


def _cost(kind: Kind) -> int:
    return kind.bench.study.cost if isinstance(kind, Search) else 0
