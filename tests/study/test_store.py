"""The store of studies: shared by several, and refused before anything is trained."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from eagle3.errors import HarnessError
from eagle3.tracking import NullTracker
from experiments.study import store, work
from experiments.study.opening import prepare, reach
from experiments.study.run import open_searches
from experiments.study.store import SLOT
from tests.settings_of import change
from tests.tiny_study import run, study_of


@pytest.mark.parametrize("url", ["redis://here", "sqlite", "mysql://u:secret@h/d"])
def test_stores_of_another_kind(project: Path, url: str) -> None:
    with pytest.raises(HarnessError, match="cannot be kept there") as raised:
        run(project, storage=url)
    assert "secret" not in str(raised.value)


def test_a_server_whose_port_is_no_number(project: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be reached") as raised:
        store.open_store(store.store_url(project, "postgresql://ann:secret@host:port/db"), 15)
    assert "host:port/db" in str(raised.value) and "secret" not in str(raised.value)


def test_a_store_that_is_not_one(project: Path) -> None:
    (project / "studies.db").write_text("poetry")
    with pytest.raises(HarnessError, match="cannot be reached"):
        run(project)


def test_other_data_or_settings_are_another_study(project: Path) -> None:
    open_searches(reach(prepare(project), None))
    change(project, study={"cost": 1600})
    with pytest.raises(HarnessError, match=r"changed: search: cost[\s\S]*--name"):
        run(project)
    change(project, study={"cost": 1500})
    index = project / "data" / "hidden_states" / "dev" / "index.jsonl"
    before = index.read_text()
    index.write_text(before.replace(": ", ":"))  # other bytes
    with pytest.raises(HarnessError, match=r"changed: data: .*dev/index.jsonl"):
        run(project)
    index.write_text(before)
    change(project, study={"trials": 5})  # more of the same is the same study
    searches = open_searches(reach(prepare(project), None))
    assert [len(search.study.trials) for search in searches] == [5, 5]


class Quiet:
    """A listener."""

    def began(self, kind: Any, trial: Any) -> None: ...

    def update(self) -> None: ...


def test_a_slot_taken_over_is_not_told_twice(project: Path) -> None:
    """A worker that was silent too long wakes up: what it says of its slot is dropped."""
    change(project, study={"trials": 1})
    place = reach(prepare(project), None)
    search = open_searches(place)[0]
    trial = store.claim(search.study, place.storage, place.url)
    assert trial is not None
    search.run(trial, NullTracker())
    place.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)  # as others see it
    assert not store.tell(search.study, trial, 2.0, TrialState.COMPLETE)
    # Nobody put it back: opening the study again queues the slot anew.
    again = open_searches(place)[0]
    work.work_through(place, [again], Quiet())
    states = [t.state for t in again.study.trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_slot_whose_workers_are_killed_again_and_again_is_kept(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/killed.db"
    storage = store.open_store(url, 15)
    study = store.open_study(storage, url, "x", {}, [({}, {"seed": 7})])
    for _ in range(6):
        assert store.claim(study, storage, url) is not None
        with contextlib.closing(sqlite3.connect(tmp_path / "killed.db")) as database, database:
            database.execute("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
    trial = store.claim(study, storage, url)
    assert trial is not None and trial.user_attrs == {SLOT: 0, "seed": 7}


def test_a_fresh_store_met_by_several(tmp_path: Path, project_root: Path) -> None:
    code = (
        "import sys; from experiments.study.store import open_store, open_study, claim\n"
        "url = sys.argv[1]; s = open_store(url, 15)\n"
        "study = open_study(s, url, 'x', {'a': 1}, [({}, {}) for _ in range(6)])\n"
        "while (t := claim(study, s, url)) is not None: study.tell(t, 1.0)\n"
    )
    url = f"sqlite:///{tmp_path}/fresh.db"
    environment = {**os.environ, "PYTHONPATH": str(project_root)}
    command = [sys.executable, "-c", code, url]
    several = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in several] == [0, 0, 0]
    trials = study_of(tmp_path, "x", url).trials
    assert sorted(t.user_attrs[SLOT] for t in trials) == list(range(6))
    assert {t.state for t in trials} == {TrialState.COMPLETE}
