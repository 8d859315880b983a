"""Where studies are kept: an Optuna store that many workers share, and the slots of a study.

A study is a fixed number of slots, queued when it is made; a worker takes one, and the slot of a
worker that died goes back into the queue with what had been drawn for it. So no trial is lost or
counted twice, whoever runs the command how often. Knows nothing of training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from eagle3.errors import HarnessError
from eagle3.workspace import digest, waited_for

log = logging.getLogger(__name__)

Slot = tuple[Mapping[str, Any], Mapping[str, Any]]  # parameters that are given, and attributes
FILE = "studies.db"
FACTS, SLOT = "facts", "slot"
SILENT = 4  # heartbeats missed before a worker is taken for dead
LOCK = 0x6561_676C_6533  # the advisory lock's name among others of the same server
POSTGRES = ("postgresql", "postgres")

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
# With few trials some values of an axis have been tried once: the report says how many there were.
warnings.filterwarnings("ignore", message="Some regimes for parameter")
# Workers here keep their own hearts beating: see `alive`.
warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")

# However often its workers were stopped or killed: a result never lacks a slot.
AGAIN = RetryHeartbeatStaleTrialCallback(inherit_intermediate_values=True)


def store_url(root: Path, wanted: str | None) -> str:
    """The URL of the store: as wanted, or the project's own SQLite file.

    Raises:
        HarnessError: a kind of store that has no heartbeat here.
    """
    if wanted is None:
        return f"sqlite:///{root.resolve() / FILE}"
    kind, found, rest = wanted.partition("://")
    if found and kind.split("+")[0] in POSTGRES:
        driver = kind.split("+")[1] if "+" in kind else "psycopg"
        return f"postgresql+{driver}://{rest}"
    if found and kind == "sqlite":
        return f"sqlite:///{(root / rest.removeprefix('/')).resolve()}"
    raise HarnessError(
        "a study cannot be kept there",
        where="--storage",
        rule="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE",
        got=wanted.split("@")[-1],
        fix="one of these, or no --storage for the project's own file",
    )


def is_there(url: str) -> bool:
    """Whether there is such a store; True for a server, which is asked when it is reached."""
    return not url.startswith("sqlite:///") or Path(url.removeprefix("sqlite:///")).is_file()


def shown(url: str) -> str:
    """The URL without its password; of one that is no URL, what comes after it."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return url.rpartition("@")[-1]


def open_store(url: str, heartbeat: int) -> RDBStorage:
    """Opens a store, its tables made if it is new: by one process at a time.

    Raises:
        HarnessError: it cannot be reached.
    """
    sqlite = url.startswith("sqlite")
    wait = {"timeout": 60} if sqlite else {"connect_timeout": 10}
    try:
        with exclusive(url):
            return RDBStorage(
                url,
                engine_kwargs={"connect_args": wait, "pool_pre_ping": True},
                heartbeat_interval=heartbeat,
                grace_period=SILENT * heartbeat,
                heartbeat_stale_trial_callback=AGAIN,
            )
    except HarnessError:
        raise
    except Exception as error:  # whatever a driver or a network raises
        raise HarnessError(
            "the store of studies cannot be reached",
            where=shown(url),
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="start the server or correct --storage; without it, the project's own file is used",
        ) from None


@contextlib.contextmanager
def exclusive(url: str) -> Iterator[None]:
    """One process at a time, on all machines that share the store."""
    if url.startswith("sqlite:///"):
        database = Path(url.removeprefix("sqlite:///"))
        with waited_for(database.with_name(f"{database.name}.lock")):
            yield
        return
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, connect_args={"connect_timeout": 10})
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f"SELECT pg_advisory_lock({LOCK})"))
            yield  # the lock ends with its connection, however that ends
    finally:
        engine.dispose()


def open_study(
    storage: RDBStorage,
    url: str,
    name: str,
    facts: Mapping[str, Any],
    slots: Sequence[Slot],
    *,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
) -> optuna.Study:
    """A study of these slots, made or taken up; slots that it lacks are queued.

    Args:
        facts: what its results come from. A study of other facts is not taken up.
        slots: parameters that are not given are drawn.

    Raises:
        HarnessError: there is a study of that name with other facts.
    """
    now = json.loads(json.dumps(facts))
    with exclusive(url):
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            sampler=sampler,
            pruner=pruner or optuna.pruners.NopPruner(),
        )
        before = study.user_attrs.get(FACTS)
        if before is None:
            study.set_user_attr(FACTS, now)
        elif before != now:
            raise HarnessError(
                "the study of this name was made from other data, code or settings",
                where=f"study {name} in {shown(url)}",
                rule="a study goes on with what it was begun with",
                got=f"changed: {', '.join(_changed(before, now))}",
                fix="put that back, or give a new name: --name, or study.name in params.yaml",
            )
        there = {
            trial.user_attrs.get(SLOT)
            for trial in study.get_trials(deepcopy=False)
            if trial.state != TrialState.FAIL
        }
        for number, (params, attributes) in enumerate(slots):
            if number not in there:
                study.enqueue_trial(dict(params), user_attrs={SLOT: number, **attributes})
    return study


def study_digest(study: optuna.Study) -> str:
    """Of all that its results come from."""
    return digest(study.user_attrs[FACTS])


def claim(study: optuna.Study, storage: RDBStorage, url: str) -> optuna.Trial | None:
    """A queued slot, now this process's; None where none waits.

    Under the lock, so that no other worker takes the slot that was seen, and no slot is between
    its dead worker and the queue when somebody looks.
    """
    with exclusive(url):
        optuna.storages.fail_stale_trials(study)
        if not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return None
        trial = study.ask()
        storage.record_heartbeat(trial._trial_id)  # from here on its silence is noticed
        return trial


def running(study: optuna.Study) -> bool:
    """Whether a slot is at work, here or elsewhere: it may come back into the queue."""
    return bool(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Slots that came to an end, given up ones included, in the order in which they did."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    found = study.get_trials(deepcopy=False, states=states)
    return sorted(found, key=lambda trial: (trial.datetime_complete, trial.number))


def hand_back(study: optuna.Study, trial: optuna.Trial, url: str) -> None:
    """Puts a slot back into the queue with what had been drawn for it."""
    with exclusive(url):
        frozen = study.get_trials(deepcopy=True)[trial.number]
        if frozen.state == TrialState.RUNNING:
            study.tell(trial, state=TrialState.FAIL)
            AGAIN(study, frozen)


def tell(study: optuna.Study, trial: optuna.Trial, value: float | None, state: TrialState) -> bool:
    """Ends a slot; False where it was given to another worker in the meantime."""
    try:
        study.tell(trial, value, state=state)
    except (optuna.exceptions.UpdateFinishedTrialError, ValueError) as error:
        if trial.storage.get_trial(trial._trial_id).state == TrialState.RUNNING:
            raise
        log.warning("trial %d was taken over by another worker: %s", trial.number, error)
        return False
    return True


@contextlib.contextmanager
def alive(storage: RDBStorage, trial: optuna.Trial) -> Iterator[None]:
    """Says that this process works on the trial, until the block ends."""
    interval = storage.get_heartbeat_interval() or 60
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval):
            try:
                storage.record_heartbeat(trial._trial_id)
            except Exception as error:  # the store is away for a moment; the next beat may arrive
                log.warning("heartbeat: %s", str(error).splitlines()[0])

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += _changed(old, new, f"{prefix}{key}: ")
        elif old != new:
            names.append(f"{prefix}{key}")
    return names
