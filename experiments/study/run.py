"""`eagle3 study`: both searches, then the comparison of what they found, then the summary.

One process does it all, or starts workers and watches; either way the store holds all that is
known, and the same command goes on where any of them stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.report.data import ReportData
from eagle3.tracking import NullTracker, Tracker
from eagle3.workspace import digest
from experiments.evidence import KEY
from experiments.study import compare
from experiments.study.bench import Bench
from experiments.study.fixed import check_answers, take_up
from experiments.study.notes import StudyNote, best_so_far, progress, searched
from experiments.study.opening import prepare, reach
from experiments.study.origin import evidence_of, tell_origin
from experiments.study.progress import Board, say, seconds_of
from experiments.study.publishing import publish, publish_pictures
from experiments.study.search import Search, best_trial, check_search, open_search
from experiments.study.side_by_side import arguments, is_open, run_given
from experiments.study.store import FACTS, shown
from experiments.study.summary import summary
from experiments.study.tracking import parent_run, set_parent
from experiments.study.work import Kind, Place, work_through
from experiments.study.workers import run_workers
from stages.runner import set_threads

REPORT = Path("reports") / "study.json"
PICTURES = "Pictures: study.html, under Artifacts."


def check_searches(bench: Bench, *, with_comparison: bool) -> None:
    """Everything that trials and comparison will need, before there is a store.

    Raises:
        HarnessError: an arm, a space, a checkpoint or test answers that cannot be used.
    """
    arms = [bench.arm(name) for name in bench.study.arms]
    for arm in arms:
        bench.check_start(arm)
        check_search(bench, arm)
    if with_comparison:
        check_answers(bench, arms[0], "test")


def open_searches(place: Place) -> list[Search]:
    """Each arm's study."""
    bench = place.bench
    return [open_search(place, bench.arm(name)) for name in bench.study.arms]


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
    bench = prepare(root, name, finetune_from)
    check_searches(bench, with_comparison=with_comparison)
    place = reach(bench, storage)
    searches = open_searches(place)
    study, store = bench.study, shown(place.url)
    key = digest([searches[0].study.user_attrs[FACTS], study.name, place.url])[:16]
    say(f"study {study.name} in {store}: {', '.join(study.arms)}, {study.trials} trials each")
    with parent_run(root, study.name, key, store) as (tracker, parent):
        tracker.log_params({"study": study.name, "cost": study.cost, "trials": study.trials})
        studies = [search.study for search in searches]
        tell_origin(tracker, bench, *studies, threads=bench.run.threads)
        note = StudyNote(tracker, searched(searches), set_parent(studies, parent, tracker))
        until = None if study.seconds is None else time.monotonic() + study.seconds
        board = Board(
            searches,
            tracker,
            ahead=_ahead(bench, searches) if with_comparison else 0,
            workers=workers,
            changed=lambda: note.tell(best_so_far(searches)),
        )
        limit = replace(place, until=until)
        _search(limit, searches, board, workers, finetune_from, root / ".work" / f"study-{key}")
        limited = limit.over and any(is_open(search) for search in searches)
        if limited:
            say(f"the outer limit of {study.seconds} s ended the search")
        compared, seconds = None, 0.0
        if with_comparison and all(best_trial(search.study) for search in searches):
            queue = compare.open_compare(place, searches)
            set_parent([queue.study], parent, tracker)
            best = best_so_far(searches)
            run_given(
                place,
                queue,
                tracker,
                changed=lambda: note.tell(f"{best}\n\nComparison: {progress(queue)}"),
                workers=workers,
                finetune_from=finetune_from,
            )
            seconds = seconds_of(queue.study)
            compared = compare.result(queue, searches)
        found = summary(searches, compare=compared, seconds=seconds, limited=limited)
        found["verifier"] = searches[0].arm.data.head.config.verifier
        found[KEY] = evidence_of(bench, *studies, name=study.name, threads=bench.run.threads)
        _publish(root, found, tracker)
        verdict = (compared or {}).get("verdict", "The arms were not compared.")
        note.tell(f"{verdict}\n\n{best_so_far(searches)}", PICTURES)
    say(f"{REPORT} written")
    if compared and "verdict" in compared:
        print(compared["verdict"])


def run_worker(
    root: Path,
    *,
    name: str | None,
    storage: str | None,
    finetune_from: Path | None,
    queue: str | None,
    seconds: float | None,
) -> None:
    """What each process of several does: the search, or the trainings of a queue."""
    place = reach(prepare(root, name, finetune_from), storage)
    kinds: Sequence[Kind]
    if queue is None:
        kinds = open_searches(place)
    else:
        set_threads(place.bench.study.threads)
        kinds = [take_up(place, queue)]
    until = None if seconds is None else time.monotonic() + seconds
    work_through(replace(place, until=until), kinds, Board(kinds, NullTracker()))


def _search(
    place: Place,
    searches: Sequence[Search],
    board: Board,
    workers: int,
    finetune_from: Path | None,
    logs: Path,
) -> None:
    if workers > 1:
        command = ["work", *arguments(place.bench, place.url, finetune_from)]
        if place.until is not None:
            command += ["--seconds", str(max(place.until - time.monotonic(), 0.0))]
        run_workers(workers, command, root=place.bench.root, logs=logs, board=board)
    # All slots, or those of workers that died when no other was left to take them.
    if any(is_open(search) for search in searches) and not place.over:
        work_through(place, searches, board)


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
    publish(root / REPORT, found, tracker)
    publish_pictures(root / REPORT, ReportData(study=found), tracker, f"Study {found['study']}")
    for arm, about in found["arms"].items():
        if about["best_tau"] is None:
            raise HarnessError(
                "no trial of an arm came to its end",
                where=arm,
                rule="one finished trial or more",
                got="none",
                fix="run the same command again, with lower rates in study.space if losses "
                "were not finite",
            )
        tracker.log_metrics({f"best_dev_tau_of_all.{arm}": about["best_tau"]}, 0)
