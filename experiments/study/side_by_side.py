"""Trainings whose settings are given, run by several processes of few threads.

Nothing is drawn for them, so it does not matter which process runs which. On CPUs a second process
is worth more than a second thread: a step of a small drafter is many short operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from eagle3.tracking import Tracker
from eagle3.workspace import digest
from experiments.evidence import KEY
from experiments.study.bench import Bench, BenchArm
from experiments.study.fixed import Fixed
from experiments.study.notes import StudyNote, progress
from experiments.study.origin import evidence_of, tell_origin
from experiments.study.progress import Board, seconds_of
from experiments.study.store import FACTS, running, shown
from experiments.study.tracking import parent_run, set_parent
from experiments.study.work import Kind, Place, work_through
from experiments.study.workers import run_workers
from stages.runner import set_threads


def processes(bench: Bench, workers: int) -> int:
    """How many run at a time: as wanted, and at least as many as the pinned threads are for."""
    if bench.run.device != "cpu":
        return workers
    return max(workers, bench.run.threads // bench.study.threads)


def run_given(
    place: Place,
    queue: Fixed,
    tracker: Tracker,
    *,
    changed: Callable[[], None],
    workers: int,
    finetune_from: Path | None = None,
) -> None:
    """Runs a queue to its end.

    Args:
        changed: called when trainings have ended.
        workers: processes that are wanted at the least.

    Raises:
        HarnessError: all workers died.
    """
    bench = place.bench
    count = processes(bench, workers)
    board = Board([queue], tracker, workers=count, changed=changed)
    if is_open(queue) and count > 1:
        name = queue.study.study_name
        command = ["work", "--queue", name, *arguments(bench, place.url, finetune_from)]
        logs = bench.root / ".work" / f"study-{name}"
        run_workers(count, command, root=bench.root, logs=logs, board=board)
    # All of them, or those of workers that died when no other was left to take them.
    if is_open(queue):
        set_threads(bench.study.threads)
        try:
            work_through(place, [queue], board)
        finally:
            set_threads(bench.run.threads)


@contextlib.contextmanager
def run_as_study(
    place: Place, queue: Fixed, about: str, *, workers: int
) -> Iterator[tuple[Tracker, StudyNote]]:
    """Runs a queue to its end as a study of its own in MLflow; the block says what was found.

    Args:
        about: what is asked, in words.
    """
    study = queue.study
    key = digest([study.user_attrs[FACTS], place.url])[:16]
    with parent_run(place.bench.root, study.study_name, key, shown(place.url)) as (tracker, parent):
        tell_origin(tracker, place.bench, study, threads=place.bench.study.threads)
        note = StudyNote(tracker, about, set_parent([study], parent, tracker))
        run_given(
            place, queue, tracker, changed=lambda: note.tell(progress(queue)), workers=workers
        )
        yield tracker, note


def about_queue(queue: Fixed, arm: BenchArm, **settings: Any) -> dict[str, Any]:
    """What the JSON of a queue that `run_as_study` ran says of how it came about.

    Args:
        settings: as `evidence_of` takes them.
    """
    bench, study = queue.bench, queue.study
    return {
        "verifier": arm.data.head.config.verifier,
        "seconds": round(seconds_of(study), 1),
        KEY: evidence_of(
            bench, study, name=study.study_name, threads=bench.study.threads, **settings
        ),
    }


def is_open(kind: Kind) -> bool:
    """Whether slots wait or are at work."""
    waiting = kind.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    return bool(waiting) or running(kind.study)


def arguments(bench: Bench, url: str, finetune_from: Path | None) -> list[str]:
    """What a worker's command line must say besides its work."""
    made = ["--name", bench.study.name, "--storage", url]
    if finetune_from is not None:
        made += ["--finetune-from", str(finetune_from)]
    return made
