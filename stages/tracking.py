"""MLflow behind the Tracker protocol: which store, and a run whose metrics outlive it.

All that is said goes to a local journal first (eagle3/tracking.py); a thread sends it on in batches
(stages/sending.py). Training never waits for the store, whatever its state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3.tracking import JsonlTracker
from stages.provenance import ORIGIN_FILE
from stages.sending import Sender, State, lock_journal
from stages.signals import ignore_stop_signals, is_stop
from stages.system_metrics import PREFIX, Watch

log = logging.getLogger(__name__)

EXPERIMENT = "eagle3"
FLUSH_SECONDS = 15.0
# Longest wait for the store when a run ends. A local one may have to be made first.
CLOSE_SECONDS = 20.0
CLOSE_SECONDS_LOCAL = 120.0

# Where a run's journal is: whether a run that never ended is dead can be told there alone.
HOST_TAG = "host"
JOURNALS_TAG = "journals"

# Read by MLflow when it is imported, so before any import of it. Its default of seven retries
# blocks for four minutes on a dead server.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


@dataclass(frozen=True)
class Store:
    """An MLflow store: an absolute URI, and where artifacts go (None: the server decides)."""

    uri: str
    artifacts: Path | None
    experiment: str = EXPERIMENT

    @property
    def database(self) -> Path | None:
        """The SQLite file, if it is one."""
        if not self.uri.startswith("sqlite:"):
            return None
        return Path(self.uri.removeprefix("sqlite:///"))

    @property
    def is_there(self) -> bool:
        """False where asking it for a run would make it; of a server nobody knows unasked."""
        return self.database is None or self.database.is_file()


def _outer_root(root: Path) -> Path:
    # `dvc exp run --temp` deletes the current folder at its end; DVC_ROOT is the original one.
    return Path(os.environ.get("DVC_ROOT") or root).resolve()


def _store_root(root: Path) -> Path:
    """Of an overlay's folder the project's, where its pipeline's runs are, too."""
    outer = _outer_root(root)
    overlay = (outer / ORIGIN_FILE).is_file() and outer.parent.parent.name == ".work"
    return outer.parents[2] if overlay else outer


def resolve_store(root: Path) -> Store:
    """MLFLOW_TRACKING_URI, else mlflow.db under DVC_ROOT, else under the project's root."""
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri and not uri.startswith("sqlite:"):
        return Store(uri, None, experiment)
    if uri:
        # An absolute path has four slashes. A relative one is taken from the project's root.
        database = _store_root(root) / uri.removeprefix("sqlite:///")
    else:
        database = _store_root(root) / "mlflow.db"
    return Store(f"sqlite:///{database}", database.parent / "mlartifacts", experiment)


def journal_root(root: Path) -> Path:
    """Where journals lie; those of finished runs that could not be sent wait here."""
    return _outer_root(root) / ".work" / "tracking"


class MlflowTracker:
    """A run: says to the journal, and a thread sends it on.

    Args:
        resume_key: names the journal. One that a killed run left under this name is taken up, with
            the same MLflow run. None: always a new one.
        watch: says what the run costs its machine, too.
    """

    def __init__(
        self,
        store: Store,
        journals: Path,
        *,
        run_name: str,
        resume_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        flush_seconds: float = FLUSH_SECONDS,
        watch: bool = False,
    ) -> None:
        name = resume_key or f"{run_name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        folder = journals / re.sub(r"[^\w.@-]", "_", name)
        self._lock = lock_journal(folder, wait=True)
        self._sender = Sender(store, folder, _take_up(store, folder, run_name, bool(resume_key)))
        self._journal = JsonlTracker(folder)
        self._flush_seconds = flush_seconds
        self._closing = threading.Event()
        place = {HOST_TAG: platform.node(), JOURNALS_TAG: str(journals)}
        self.log_tags({"mlflow.runName": run_name, **place, **(tags or {})})
        # A daemon: a store that hangs cannot keep the process from ending.
        self._thread = threading.Thread(
            target=self._send_in_background, args=(journals,), daemon=True, name="mlflow"
        )
        self._thread.start()
        first = self._journal.next_step(PREFIX)
        self._watch = Watch(self._journal.log_metrics, first=first) if watch else None

    def log_params(self, params: Mapping[str, object]) -> None:
        self._journal.log_params(params)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        self._journal.log_tags(tags)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._journal.log_metrics(metrics, step)

    def log_artifact(self, path: Path) -> None:
        self._journal.log_artifact(path)

    def run_id(self, seconds: float) -> str | None:
        """The run's id, waited for so long; None while the store has not answered."""
        until = time.monotonic() + seconds
        while self._sender.state.run_id is None and time.monotonic() < until:
            time.sleep(0.05)
        return self._sender.state.run_id

    def close(self, status: str = "FINISHED") -> dict[str, str | None]:
        """Sends the rest, for a bounded time; what is left over stays in the journal.

        Returns:
            name, run_id (None when the store never answered), store, experiment.
        """
        sender = self._sender
        if self._watch is not None:
            self._watch.stop()
        sender.finish(status)
        self._journal.close()
        self._closing.set()
        self._thread.join(CLOSE_SECONDS if sender.store.database is None else CLOSE_SECONDS_LOCAL)
        if not sender.state.closed:
            log.warning(
                "MLflow at %s did not take all of run %s; the rest is kept in %s and goes out with "
                "the next run, or with `eagle3 sync`",
                sender.store.uri,
                sender.state.run_name,
                sender.folder,
            )
        # A thread that still hangs in a call keeps its right until the process ends.
        if self._lock is not None and not self._thread.is_alive():
            self._lock.close()
        return sender.about()

    def _send_in_background(self, journals: Path) -> None:
        pause = self._flush_seconds
        while not self._closing.wait(pause):
            # A dead store is asked less and less often.
            sent = self._sender.flush()
            pause = self._flush_seconds if sent else min(2 * pause, 300.0)
        if self._sender.flush():
            replay(self._sender.store, journals)


@contextlib.contextmanager
def closing(tracker: MlflowTracker) -> Iterator[MlflowTracker]:
    """Ends the run as what became of it: FINISHED, KILLED by whoever stopped it, or FAILED."""
    status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    except BaseException as error:
        if is_stop(error):
            ignore_stop_signals()  # an impatient hand's second Ctrl-C must not tear the journal
            status = "KILLED"
        raise
    finally:
        tracker.close(status)


def _take_up(store: Store, folder: Path, run_name: str, resumable: bool) -> State:
    """The sending state of a journal: what a killed or failed run left, or a new one."""
    saved = State.read(folder)
    if saved is not None and saved.status == "FINISHED":
        # Finished without the store: it waits under another name, and this is a new run.
        folder.rename(folder.with_name(f"{folder.name}-{saved.journal[:8]}"))
        saved = None
    if saved is None or saved.store != store.uri:
        # A store that was never told of the run gets its journal from the beginning.
        return State(store.uri, store.experiment, run_name, resumable)
    saved.status, saved.closed = None, False
    return saved


def replay(store: Store, journals: Path) -> list[dict[str, str | None]]:
    """Sends what earlier runs left behind; returns those that the store now has completely, as
    `Sender.about` says them.

    A run that was killed is closed as such; it can still be taken up. Journals that a living
    process writes are left alone, and so are those for other stores.
    """
    complete = []
    for folder in sorted(journals.glob("*/")):
        lock = lock_journal(folder, wait=False)
        if lock is None:
            continue
        with lock:
            state = State.read(folder)
            if state is None or state.closed or state.store != store.uri:
                continue
            sender = Sender(store, folder, state)
            if state.status is None:
                sender.finish("KILLED")
            if sender.flush():
                complete.append(sender.about())
    return complete
