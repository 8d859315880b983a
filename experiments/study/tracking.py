"""A study in MLflow: one run for the study, and one below it for each of its trainings.

Runs go through the project's own journal, so that nothing waits for the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.tracking import NullTracker, Tracker
from eagle3.workspace import locked
from stages.notes import TAG
from stages.tracking import (
    CLOSE_SECONDS,
    CLOSE_SECONDS_LOCAL,
    MlflowTracker,
    closing,
    journal_root,
    resolve_store,
)

PARENT = "mlflow_parent"
CHILDREN = "Each training of this study is a child run."
FLUSH_SECONDS = 2.0


def run_name(study: str) -> str:
    """Of a study's own run."""
    return f"study {study}"


@contextlib.contextmanager
def parent_run(
    root: Path, name: str, key: str, store_of_study: str
) -> Iterator[tuple[Tracker, str | None]]:
    """The study's own run, taken up where it was left, and its id.

    Args:
        key: of all that the study's results come from.
        store_of_study: where its slots are, for people.

    Where another process of this machine holds it, there is nothing to say and no id.
    """
    lock = root / ".work" / f"study-{key}.parent.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock) as held:
        if held is None:
            yield NullTracker(), None
            return
        store = resolve_store(root)
        tracker = MlflowTracker(
            store,
            journal_root(root),
            run_name=run_name(name),
            resume_key=f"study-{name}-{key}",
            tags={"kind": "study", "study": name, "storage": store_of_study, TAG: CHILDREN},
            flush_seconds=FLUSH_SECONDS,
        )
        with closing(tracker):
            wait = CLOSE_SECONDS if store.database is None else CLOSE_SECONDS_LOCAL
            yield tracker, tracker.run_id(wait)


def set_parent(studies: Sequence[Any], parent: str | None, tracker: Tracker) -> str:
    """Remembers the run below which the trainings of some Optuna studies stand; says which that is.

    Those of an earlier call stay where they are: the new run says where.
    """
    if parent is None:
        return CHILDREN
    earlier = ", ".join(
        sorted({study.user_attrs.get(PARENT) for study in studies} - {None, parent})
    )
    for study in studies:
        study.set_user_attr(PARENT, parent)
    if not earlier:
        return CHILDREN
    tracker.log_tags({"continues": earlier})
    return f"{CHILDREN} Earlier ones are below run {earlier}."


@contextlib.contextmanager
def child_run(
    root: Path, name: str, parent: str | None, tags: Mapping[str, str]
) -> Iterator[MlflowTracker]:
    """A training's run below the study's; one that was given up early is finished too."""
    below = {} if parent is None else {"mlflow.parentRunId": parent}
    tracker = MlflowTracker(
        resolve_store(root),
        journal_root(root),
        run_name=name,
        tags={"kind": "trial", **below, **tags},
        watch=True,
    )
    with closing(tracker):
        yield tracker
