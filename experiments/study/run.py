"""`eagle3 study`: both searches, then the comparison of what they found, then the summary.

One process does it all, or starts workers and watches; either way the store holds all that is
known, and the same command goes on where any of them stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage
from optuna.trial import TrialState

from eagle3.errors import HarnessError
from eagle3.report.data import ReportData
from eagle3.report.page import ReportSettings, render
from eagle3.tracking import NullTracker, Tracker
from eagle3.workspace import digest, write_atomically, write_json
from experiments.study import compare
from experiments.study.bench import Bench, quiet
from experiments.study.progress import Board, say, seconds_of
from experiments.study.search import Search, best_trial, open_search
from experiments.study.settings import StudySettings
from experiments.study.store import open_store, running, shown, store_url
from experiments.study.summary import summary
from experiments.study.tracking import PARENT, parent_run
from experiments.study.work import Kind, Place, work_through
from experiments.study.workers import run_workers
from stages.runner import check_device, set_logging, set_threads

REPORT = Path("reports") / "study.json"
PAGE = "study.html"


def prepare(
    root: Path, name: str | None, storage: str | None, finetune_from: Path | None
) -> tuple[Bench, RDBStorage, str]:
    """Settings and store, read and reached before anything long begins.

    Raises:
        HarnessError: what cannot be used.
    """
    set_logging()
    quiet()
    bench = Bench(root, finetune_from=finetune_from)
    if name is not None:
        values = {**bench.study.model_dump(), "name": name}
        bench.study = StudySettings.model_validate(values)
    set_threads(bench.run.threads)
    check_device(bench.run.device)
    url = store_url(root, storage)
    return bench, open_store(url, bench.study.heartbeat), url


def open_searches(bench: Bench, storage: RDBStorage, url: str) -> list[Search]:
    """Both arms' studies; all arms are checked before any of them is made."""
    arms = [bench.arm(name) for name in bench.study.arms]
    for arm in arms:
        bench.check_start(arm)
    return [open_search(bench, arm, storage, url) for arm in arms]


def run_study(
    root: Path,
    *,
    name: str | None,
    storage: str | None,
    finetune_from: Path | None,
    workers: int,
    with_comparison: bool,
) -> None:
    """Searches, compares and writes `reports/study.json`.

    Raises:
        HarnessError: anything that cannot be used, before the first trial.
    """
    bench, store, url = prepare(root, name, storage, finetune_from)
    searches = open_searches(bench, store, url)
    study = bench.study
    key = digest([searches[0].study.user_attrs["facts"], study.name, url])[:16]
    say(f"study {study.name} in {shown(url)}: {', '.join(study.arms)}, {study.trials} trials each")
    with parent_run(root, study.name, key, {"storage": shown(url)}) as (tracker, parent):
        tracker.log_params({"study": study.name, "cost": study.cost, "trials": study.trials})
        _set_parent([search.study for search in searches], parent)
        until = None if study.seconds is None else time.monotonic() + study.seconds
        extra = _arguments(bench, url, finetune_from)
        board = Board(
            searches,
            tracker,
            ahead=_ahead(bench, searches) if with_comparison else 0,
            workers=workers,
        )
        place = Place(bench, store, url, until)
        _work(place, searches, board, workers, ["work", *extra], root / ".work" / f"study-{key}")
        limited = place.over and any(_open(search) for search in searches)
        if limited:
            say(f"the outer limit of {study.seconds} s ended the search")
        compared, seconds = None, 0.0
        if with_comparison and all(best_trial(search.study) for search in searches):
            queue = compare.open_compare(searches, store, url)
            _set_parent([queue.study], parent)
            board = Board([queue], tracker, workers=workers)
            place = Place(bench, store, url)
            _work(
                place, [queue], board, workers, ["work", "--comparison", *extra],
                root / ".work" / f"study-{key}",
            )  # fmt: skip
            seconds = seconds_of(queue.study)
            compared = compare.result(queue, searches)
        found = summary(searches, compare=compared, seconds=seconds, limited=limited)
        _publish(root, found, tracker)
    say(f"{REPORT} written")
    if compared and "verdict" in compared:
        print(compared["verdict"])


def run_worker(
    root: Path,
    *,
    name: str | None,
    storage: str | None,
    finetune_from: Path | None,
    comparison: bool,
    seconds: float | None,
) -> None:
    """What each process of `--workers` does."""
    bench, store, url = prepare(root, name, storage, finetune_from)
    searches = open_searches(bench, store, url)
    kinds: Sequence[Kind] = searches
    if comparison:
        kinds = [compare.open_compare(searches, store, url)]
    until = None if seconds is None else time.monotonic() + seconds
    work_through(Place(bench, store, url, until), kinds, Board(kinds, NullTracker()))


def _work(
    place: Place,
    kinds: Sequence[Kind],
    board: Board,
    workers: int,
    command: list[str],
    logs: Path,
) -> None:
    if workers == 1:
        work_through(place, kinds, board)
        return
    if place.until is not None:
        command = [*command, "--seconds", str(max(place.until - time.monotonic(), 0.0))]
    run_workers(workers, command, root=place.bench.root, logs=logs, board=board)
    # Slots of workers that died when no other was left to take them.
    if any(_open(kind) for kind in kinds) and not place.over:
        work_through(place, kinds, board)


def _open(kind: Kind) -> bool:
    waiting = kind.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    return bool(waiting) or running(kind.study)


def _arguments(bench: Bench, url: str, finetune_from: Path | None) -> list[str]:
    made = ["--name", bench.study.name, "--storage", url]
    if finetune_from is not None:
        made += ["--finetune-from", str(finetune_from)]
    return made


def _set_parent(studies: Sequence[Any], parent: str | None) -> None:
    for study in studies:
        if parent is not None:
            study.set_user_attr(PARENT, parent)


def _ahead(bench: Bench, searches: Sequence[Search]) -> int:
    """About what the comparison will cost."""
    cost = bench.study.cost * len(searches) * bench.study.compare.seeds
    larger = compare.larger_budget(searches)
    if larger is not None:
        share = bench.study.cost / max(sum(larger[0].arm.supervised), 1)
        rows = share * sum(larger[0].arm.data.lengths) / 3
        cost += round(bench.study.compare.larger_seeds * bench.study.cost * (1 + larger[1] / rows))
    return cost


def _publish(root: Path, found: dict[str, Any], tracker: Tracker) -> None:
    """The summary beside the code, and its pictures in MLflow."""
    write_json(root / REPORT, found)
    tracker.log_artifact(root / REPORT)
    page = root / ".work" / PAGE
    data = ReportData(study=found)
    write_atomically(page, render(data, ReportSettings(title=f"Study {found['study']}")))
    tracker.log_artifact(page)
    page.unlink()
    for arm, about in found["arms"].items():
        if about["best_tau"] is None:
            raise HarnessError("no trial of an arm came to its end", where=arm)
        tracker.log_metrics({f"best_dev_tau_of_all.{arm}": about["best_tau"]}, 0)
