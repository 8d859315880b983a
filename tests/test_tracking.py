"""The journal, and its way to MLflow: nothing lost, nothing twice, nobody waits."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.tracking import JsonlTracker, flatten, read_journal
from experiments import sync_command
from stages import sending, tracking
from stages.provenance import ORIGIN_FILE
from stages.sending import Sender, State, lock_journal
from stages.tracking import (
    MlflowTracker,
    Store,
    closing,
    journal_root,
    replay,
    resolve_store,
)

ROOT = Path(__file__).parent.parent


def history(store: Store, run_id: str, name: str) -> list[tuple[int, float]]:
    client, _ = sending.open_client(store)
    return sorted((m.step, m.value) for m in client.get_metric_history(run_id, name))


def dead_store() -> Store:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Store(f"http://127.0.0.1:{port}", None)


def test_journal_keeps_the_first_value(tmp_path: Path) -> None:
    journal = JsonlTracker(tmp_path)
    journal.log_metrics({"loss": 2.0}, 1)
    journal.log_metrics({"loss": 3.0, "lr": 0.5}, 1)
    journal.log_params({"train": {"lr": 1e-4}})
    journal.close()
    resumed = JsonlTracker(tmp_path)
    resumed.log_metrics({"loss": 9.0}, 1)
    resumed.log_metrics({"loss": math.nan}, 2)
    resumed.log_params({"train": {"lr": 2e-4}})
    resumed.close()
    entries, end = read_journal(tmp_path / "journal.jsonl")
    assert [(e.metrics, e.step) for e in entries if e.metrics][:2] == [
        ({"loss": 2.0}, 1),
        ({"lr": 0.5}, 1),
    ]
    assert math.isnan(entries[3].metrics["loss"])
    assert [e.params for e in entries if e.params] == [{"train.lr": "0.0001"}]
    assert entries[-1].tags == {"resumed_with.train.lr": "0.0002"}
    assert end == (tmp_path / "journal.jsonl").stat().st_size


def test_journal_drops_a_torn_line(tmp_path: Path) -> None:
    journal = JsonlTracker(tmp_path)
    journal.log_metrics({"loss": 2.0}, 1)
    journal.close()
    with journal.path.open("a") as file:
        file.write('{"time": 1.0, "metr')
    assert len(read_journal(journal.path)[0]) == 1
    resumed = JsonlTracker(tmp_path)
    resumed.log_metrics({"loss": 1.0}, 2)
    resumed.close()
    assert [e.step for e in read_journal(journal.path)[0]] == [1, 2]


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_store_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    assert resolve_store(tmp_path).uri == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "outer"))
    assert resolve_store(tmp_path).uri == f"sqlite:///{tmp_path}/outer/mlflow.db"
    assert resolve_store(tmp_path).artifacts == tmp_path / "outer" / "mlartifacts"
    assert journal_root(tmp_path) == tmp_path / "outer" / ".work" / "tracking"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    assert resolve_store(tmp_path).uri == f"sqlite:///{tmp_path}/outer/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////abs/x.db")
    assert resolve_store(tmp_path).database == Path("/abs/x.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert resolve_store(tmp_path) == Store("http://127.0.0.1:1", None)


def test_a_command_in_an_overlays_folder_uses_the_projects_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    overlay = tmp_path / ".work" / "overlays" / "my"
    overlay.mkdir(parents=True)
    (overlay / ORIGIN_FILE).write_text("{}")
    assert resolve_store(overlay) == resolve_store(tmp_path)
    assert journal_root(overlay) == overlay / ".work" / "tracking"  # names may be the project's
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    assert resolve_store(overlay).database == tmp_path / "x.db"


def test_a_run_arrives_whole(tmp_path: Path, store: Store) -> None:
    tracker = MlflowTracker(store, tmp_path / "journals", run_name="scratch", tags={"k": "v"})
    tracker.log_params({"train": {"lr": 1e-4, "note": "x" * 7000}})
    for step in range(2500):  # more than one call may carry
        tracker.log_metrics({"loss": float(step), "a/b@c": 1.0}, step)
    figure = tmp_path / "figure.txt"
    figure.write_text("drawn")
    tracker.log_artifact(figure)
    figure.unlink()  # a working folder is gone by the time the thread sends
    run_id = tracker.close()["run_id"]
    assert run_id is not None
    client, experiment = sending.open_client(store)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "scratch"
    assert run.data.params["train.lr"] == "0.0001" and len(run.data.params["train.note"]) == 6000
    assert run.data.tags["k"] == "v"
    assert history(store, run_id, "loss") == [(step, float(step)) for step in range(2500)]
    assert len(history(store, run_id, "a/b_c")) == 2500
    assert Path(client.download_artifacts(run_id, "figure.txt")).read_text() == "drawn"
    assert client.get_experiment(experiment).artifact_location == store.artifacts.as_uri()
    assert [p for p in (tmp_path / "journals").iterdir() if p.is_dir()] == []


def test_a_dead_store_costs_no_metric_and_no_time(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 1.0)
    tracker = MlflowTracker(
        dead_store(), tmp_path / "journals", run_name="scratch", flush_seconds=0.05
    )
    started = time.perf_counter()
    for step in range(200):
        tracker.log_metrics({"loss": float(step)}, step)
    assert time.perf_counter() - started < 1.0
    started = time.perf_counter()
    about = tracker.close()
    assert time.perf_counter() - started < 5.0
    assert about["run_id"] is None
    folder = next(p for p in (tmp_path / "journals").iterdir() if p.is_dir())
    assert sum(bool(e.metrics) for e in read_journal(folder / "journal.jsonl")[0]) == 200


def test_replay_sends_what_a_dead_store_missed(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "journals" / "run"
    sender = Sender(store, folder, State(store.uri, store.experiment, "scratch", resumable=False))
    journal = JsonlTracker(folder)
    journal.log_metrics({"loss": 1.0}, 1)
    sender.finish("FINISHED")
    journal.close()
    assert replay(Store("http://127.0.0.1:1", None), folder.parent) == []  # another store's
    (sent,) = replay(store, folder.parent)
    assert (sent["name"], sent["store"]) == ("scratch", store.uri)
    assert replay(store, folder.parent) == []
    client, experiment = sending.open_client(store)
    (run,) = client.search_runs([experiment])
    assert sent["run_id"] == run.info.run_id
    assert history(store, run.info.run_id, "loss") == [(1, 1.0)]


def test_sync_names_what_it_sends(
    tmp_path: Path,
    empty_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What waits for the project's store goes out by name; what waits for another is named."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    store = resolve_store(tmp_path)
    for name, uri in (("train a", store.uri), ("train b", "http://127.0.0.1:1")):
        folder = journal_root(tmp_path) / name
        sender = Sender(store, folder, State(uri, store.experiment, name, resumable=False))
        JsonlTracker(folder).log_metrics({"loss": 1.0}, 1)
        sender.finish("FINISHED")
    sync_command.run(tmp_path)
    client, experiment = sending.open_client(store)
    (run,) = client.search_runs([experiment])
    assert capsys.readouterr().out == (
        f"1 run(s) are complete now in {store.uri}:\n  {run.info.run_id}  train a\n"
        "for another store wait: train b\n"
        "  MLFLOW_TRACKING_URI=http://127.0.0.1:1 eagle3 sync sends them\n"
    )
    sync_command.run(tmp_path)
    assert capsys.readouterr().out.startswith(f"nothing waited to be sent to {store.uri}\n")


def test_replay_leaves_a_living_run_alone(tmp_path: Path, store: Store) -> None:
    tracker = MlflowTracker(store, tmp_path / "journals", run_name="scratch", resume_key="k")
    assert replay(store, tmp_path / "journals") == []
    tracker.close()


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_no_doubles_when_a_batch_may_have_arrived(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, arrived: int
) -> None:
    """The call fails after `arrived` of two points are in the store, and its answer is lost."""
    folder = tmp_path / "run"
    journal = JsonlTracker(folder)
    sender = Sender(store, folder, State(store.uri, store.experiment, "scratch", resumable=True))
    assert sender.flush()
    journal.log_metrics({"loss": 5.0}, 1)
    journal.log_metrics({"loss": 6.0}, 2)
    from mlflow import MlflowClient

    real = MlflowClient.log_batch

    def fails(self: object, run_id: str, metrics: list = (), **other: object) -> None:  # type: ignore[assignment, type-arg]
        real(self, run_id, metrics=list(metrics)[:arrived], **other)  # type: ignore[arg-type]
        raise ConnectionError("answer lost")

    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_batch", fails)
        assert not sender.flush()
    journal.log_metrics({"loss": 7.0}, 3)
    # Another process takes over, as after a kill.
    saved = State.read(folder)
    assert saved is not None and saved.sending is not None
    sent: list[int] = []

    def records(self: object, run_id: str, metrics: list = (), **other: object) -> None:  # type: ignore[assignment, type-arg]
        sent.extend(metric.step for metric in metrics)
        real(self, run_id, metrics=metrics, **other)  # type: ignore[arg-type]

    monkeypatch.setattr(MlflowClient, "log_batch", records)
    assert Sender(store, folder, saved).flush()
    assert saved.run_id is not None
    # MLflow on SQL would drop an equal point by itself; no other store promises to.
    assert sent == [1, 2, 3][arrived:]
    assert history(store, saved.run_id, "loss") == [(1, 5.0), (2, 6.0), (3, 7.0)]


def test_a_run_whose_id_was_lost_is_found_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    real = MlflowClient.create_run

    def fails(self: MlflowClient, *args: object, **kwargs: object) -> None:
        real(self, *args, **kwargs)  # type: ignore[arg-type]
        raise ConnectionError("answer lost")

    sender = Sender(store, tmp_path, State(store.uri, store.experiment, "scratch", resumable=True))
    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "create_run", fails)
        assert not sender.flush()
    assert sender.flush()
    client, experiment = sending.open_client(store)
    assert len(client.search_runs([experiment])) == 1


KILLED = """
import os, signal, sys, time
from pathlib import Path
from stages.tracking import MlflowTracker, Store
folder = Path(sys.argv[1])
tracker = MlflowTracker(Store(sys.argv[2], None), folder, run_name="r", resume_key="train-1",
                        flush_seconds=0.01)
for step in range(50):
    tracker.log_metrics({"loss": float(step)}, step)
    time.sleep(0.002)
while not (folder / "train-1" / "state.json").read_text().count('"sent": 0,') == 0:
    time.sleep(0.01)
for step in range(50, 60):
    tracker.log_metrics({"loss": float(step)}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_taken_up(tmp_path: Path, store: Store) -> None:
    journals = tmp_path / "journals"
    sending.open_client(store)
    done = subprocess.run([sys.executable, "-c", KILLED, str(journals), store.uri], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    run_id = json.loads((journals / "train-1" / "state.json").read_text())["run_id"]
    # Another process's replay closes it as killed, with all that it had said...
    assert len(replay(store, journals)) == 1
    client, _ = sending.open_client(store)
    assert client.get_run(run_id).info.status == "KILLED"
    assert len(history(store, run_id, "loss")) == 60
    # ... and the resumed run goes on in it, from its last checkpoint at step 40.
    tracker = MlflowTracker(store, journals, run_name="r", resume_key="train-1")
    for step in range(40, 80):
        tracker.log_metrics({"loss": float(step)}, step)
    assert tracker.close()["run_id"] == run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    assert history(store, run_id, "loss") == [(step, float(step)) for step in range(80)]
    assert not (journals / "train-1").exists()


def test_a_finished_run_is_not_taken_up(tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    dead = dead_store()
    folder = journals / "k"
    state = State(dead.uri, dead.experiment, "r", resumable=True)
    sender = Sender(dead, folder, state)
    journal = JsonlTracker(folder)
    journal.log_metrics({"loss": 1.0}, 1)
    journal.close()
    sender.finish("FINISHED")
    fresh = tracking._take_up(dead, folder, "r", True)
    assert fresh.journal != state.journal
    assert [p.name for p in journals.glob("k-*/")] == [f"k-{state.journal[:8]}"]


def test_a_second_stop_does_not_tear_the_end_of_a_run(signals: None) -> None:
    class Slow:
        def close(self, status: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            self.status = status

    tracker = Slow()
    with pytest.raises(KeyboardInterrupt), closing(tracker):  # type: ignore[type-var]
        raise KeyboardInterrupt
    assert tracker.status == "KILLED"


def test_one_process_at_a_time_writes_a_journal(tmp_path: Path) -> None:
    lock = lock_journal(tmp_path / "k", wait=False)
    assert lock is not None
    assert lock_journal(tmp_path / "k", wait=False) is None
    lock.close()
    again = lock_journal(tmp_path / "k", wait=False)
    assert again is not None
    again.close()


MEETING = """
import sys
from stages.sending import open_client
from stages.tracking import Store
client, experiment = open_client(Store(sys.argv[1], None))
client.create_run(experiment)
"""


def test_processes_that_meet_a_fresh_store(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "mlartifacts")
    command = [sys.executable, "-c", MEETING, store.uri]
    running = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    client, experiment = sending.open_client(store)
    assert len(client.search_runs([experiment])) == 2


def test_telemetry_is_off() -> None:
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["DO_NOT_TRACK"] == "true"


def test_a_slow_store_is_not_waited_for(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saying costs the caller microseconds while each call to the store takes a second."""
    from mlflow import MlflowClient

    real = MlflowClient.log_batch

    def slow(self: MlflowClient, *args: object, **kwargs: object) -> None:
        time.sleep(1.0)
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(MlflowClient, "log_batch", slow)
    tracker = MlflowTracker(store, tmp_path / "journals", run_name="slow", flush_seconds=0.01)
    said = 0.0
    for step in range(100):
        started = time.perf_counter()
        tracker.log_metrics({"loss": float(step), "lr": 0.1}, step)
        said += time.perf_counter() - started
        time.sleep(0.01)
    assert said < 0.5  # a hundred calls, on a busy machine; one call to the store takes twice that
    run_id = tracker.close()["run_id"]
    assert run_id is not None
    assert history(store, run_id, "loss") == [(step, float(step)) for step in range(100)]
