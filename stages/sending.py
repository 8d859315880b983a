"""Sends one run's journal to MLflow, exactly once, however often it is interrupted.

Before a batch goes out, its range of the journal is written down; after it went out, the new
position is. Where the first stands without the second (a kill, a timeout), the store is asked which
of the batch's points it has, and only the others are sent. The first value of a (metric, step)
stands. Knows nothing of who writes the journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eagle3.errors import HarnessError
from eagle3.tracking import Entry, JsonlTracker, read_journal
from eagle3.workspace import waited_for, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

    from stages.tracking import Store

log = logging.getLogger(__name__)
# It writes a traceback of each error that it raises; here they are caught and told in a line.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

JOURNAL_FILE = JsonlTracker.FILE
STATE_FILE = "state.json"

# MLflow's limits for one call.
METRICS_A_BATCH = 1000
NAMES_A_BATCH = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 5000
LONGEST_DIGEST = 36

DATA_TAG = "data."


def lock_journal(folder: Path, *, wait: bool) -> IO[str] | None:
    """The right to write and send a journal; given back when the file is closed.

    Returns:
        None if another process has it and `wait` is false.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f"{folder.name}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def open_client(store: Store) -> tuple[MlflowClient, str]:
    """A client of the store, and the id of its experiment, both made if they are new.

    By one process at a time: two that meet a fresh SQLite file corrupt its migration.
    """
    file = store.database
    with waited_for(file.with_name(f"{file.name}.lock")) if file else contextlib.nullcontext():
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=store.uri)
        experiment = client.get_experiment_by_name(store.experiment)
        if experiment is not None:
            return client, experiment.experiment_id
        location = store.artifacts.as_uri() if store.artifacts else None
        return client, client.create_experiment(store.experiment, artifact_location=location)


@contextlib.contextmanager
def asking(store: Store) -> Iterator[None]:
    """For commands that cannot do without the store.

    Raises:
        HarnessError: it does not answer, or is no store.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:  # whatever a client, a driver or a network raises
        raise HarnessError(
            "the MLflow store does not answer as one",
            where=store.uri,
            rule="MLflow's SQLite file, whole, or a server that is up",
            got=_short(error),
            fix="start the server or correct MLFLOW_TRACKING_URI; a damaged file: put a copy back, "
            "or move it away and the next run begins a new one",
        ) from None


@dataclass
class State:
    """What is known of the sending, beside the journal. Positions are bytes of the journal."""

    store: str
    experiment: str
    run_name: str
    resumable: bool  # another process may write on after a kill or a failure
    journal: str = field(default_factory=lambda: uuid.uuid4().hex)  # the run's tag, to find it by
    run_id: str | None = None
    creating: bool = False  # a run may have been made whose id never came back
    sent: int = 0
    sending: int | None = None  # end of a batch that may or may not have arrived
    status: str | None = None  # how the run ended; None while it runs, or when it was killed
    closed: bool = False  # the store knows all of it, the status too

    @staticmethod
    def read(folder: Path) -> State | None:
        """None where nothing was begun.

        Raises:
            HarnessError: the file is damaged.
        """
        path = folder / STATE_FILE
        if not path.exists():
            return None
        try:
            return State(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise HarnessError(
                "what is known of a run's journal is damaged",
                where=path,
                rule="the JSON object that was written there",
                got=_short(error),
                fix=f"move {folder} away: what MLflow has of the run stays there",
            ) from None


class Sender:
    """The way of one journal to one store. `flush` is for one thread, the rest for any."""

    def __init__(self, store: Store, folder: Path, state: State) -> None:
        self.store = replace(store, experiment=state.experiment)
        self.folder = folder
        self.state = state
        self._client: MlflowClient | None = None
        self._saving = threading.Lock()
        self._save()

    def about(self) -> dict[str, str | None]:
        """Name, id and place of the run."""
        return {
            "name": self.state.run_name,
            "run_id": self.state.run_id,
            "store": self.state.store,
            "experiment": self.state.experiment,
        }

    def finish(self, status: str) -> None:
        """Says how the run ended. Call when nothing more will be written."""
        self._save(status=status)

    def flush(self) -> bool:
        """Sends what the journal has and the store has not.

        Returns:
            whether the store took it all. Never raises for the store's sake.
        """
        try:
            self._flush()
        except Exception as error:  # whatever a client, a driver or a network raises
            self._client = None
            log.warning("MLflow at %s: %s (metrics are kept)", self.store.uri, _short(error))
            return False
        return True

    def _save(self, **changes: Any) -> None:
        with self._saving:
            for name, value in changes.items():
                setattr(self.state, name, value)
            write_json(self.folder / STATE_FILE, asdict(self.state))

    def _flush(self) -> None:
        if self.state.closed:
            return
        # Read first: once it is set, the journal is complete.
        status = self.state.status
        client = self._connect()
        doubtful = self.state.sending is not None
        while True:
            entries, end = read_journal(self.folder / JOURNAL_FILE, self.state.sent)
            if not entries:
                break
            self._save(sending=end)
            self._send(client, entries, doubtful)
            self._save(sent=end, sending=None)
            doubtful = False
        if status is None:
            return
        client.set_terminated(self._run_id, status)
        self._save(closed=True)
        if status == "FINISHED" or not self.state.resumable:
            shutil.rmtree(self.folder)

    @property
    def _run_id(self) -> str:
        assert self.state.run_id is not None
        return self.state.run_id

    def _connect(self) -> MlflowClient:
        if self._client is None:
            client, experiment_id = open_client(self.store)
            if self.state.run_id is None:
                self._save(run_id=self._find_or_create(client, experiment_id))
            elif self.state.status is None:
                client.update_run(self._run_id, status="RUNNING")
            self._client = client
        return self._client

    def _find_or_create(self, client: MlflowClient, experiment_id: str) -> str:
        """A run for this journal. One made by a call whose answer was lost is found again."""
        if self.state.creating:
            query = f"tags.journal = '{self.state.journal}'"
            if found := client.search_runs([experiment_id], query, max_results=1):
                return found[0].info.run_id
        self._save(creating=True)
        tags = {"journal": self.state.journal, "mlflow.user": os.environ.get("USER", "unknown")}
        return client.create_run(experiment_id, tags=tags, run_name=self.state.run_name).info.run_id

    def _send(self, client: MlflowClient, entries: list[Entry], doubtful: bool) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics: list[Metric] = []
        params: dict[str, Param] = {}
        tags: dict[str, RunTag] = {}
        for entry in entries:
            stamp = int(entry.time * 1000)
            metrics += [Metric(_name(n), v, stamp, entry.step) for n, v in entry.metrics.items()]
            for name, value in entry.params.items():
                params.setdefault(_name(name), Param(_name(name), value[:LONGEST_PARAM]))
            for name, value in entry.tags.items():
                tags[_name(name)] = RunTag(_name(name), value[:LONGEST_TAG])
        if doubtful:
            metrics = self._missing(client, metrics)
        for part in _parts(list(params.values()), NAMES_A_BATCH):
            client.log_batch(self._run_id, params=part, synchronous=True)
        for part in _parts(list(tags.values()), NAMES_A_BATCH):
            client.log_batch(self._run_id, tags=part, synchronous=True)
        if inputs := dataset_inputs({tag.key: tag.value for tag in tags.values()}):
            # MLflow keeps one of each name and digest, so sending again makes no double.
            client.log_inputs(self._run_id, datasets=inputs)
        for part in _parts(metrics, METRICS_A_BATCH):
            client.log_batch(self._run_id, metrics=part, synchronous=True)
        for entry in entries:
            if entry.artifact is not None:
                path = self.folder / "artifacts" / entry.artifact
                client.log_artifact(self._run_id, str(path))

    def _missing(self, client: MlflowClient, metrics: list[Metric]) -> list[Metric]:
        """Those points that the store does not have yet."""
        known = {
            (name, point.step)
            for name in {metric.key for metric in metrics}
            for point in client.get_metric_history(self._run_id, name)
        }
        return [metric for metric in metrics if (metric.key, metric.step) not in known]


def data_tags(digests: Mapping[str, str]) -> dict[str, str]:
    """What a run read, as its tags: digests by path."""
    return {f"{DATA_TAG}{path}": digest for path, digest in digests.items()}


def dataset_inputs(tags: Mapping[str, str]) -> list[DatasetInput]:
    """The artefacts that a run read, as MLflow's datasets, from what `data_tags` made."""
    from mlflow.entities import Dataset, DatasetInput

    return [
        DatasetInput(
            Dataset(
                name=name.removeprefix(DATA_TAG),
                digest=digest[:LONGEST_DIGEST],
                source_type="local",
                source=json.dumps({"uri": name.removeprefix(DATA_TAG)}),
            )
        )
        for name, digest in sorted(tags.items())
        if name.startswith(DATA_TAG)
    ]


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _name(name: str) -> str:
    """A name as MLflow allows it."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _short(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"
