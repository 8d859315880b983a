"""Fixtures that every test may use: tiny random verifiers, one thread, no telemetry, no store."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch: tests run beside each other on few cores, and sums must not depend on how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"
# A test never writes into the store of the person who runs it.
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "DVC_ROOT"):
    os.environ.pop(_name, None)

import pytest

from tests.tiny import make_tiny_verifier

if TYPE_CHECKING:
    from eagle3.verifier import VerifierSpec
    from stages.tracking import Store
    from tests.faulty import Lab


@pytest.fixture(scope="module", autouse=True)
def log_level() -> Iterator[None]:
    """A study quietens the library: it speaks again to the tests that come after."""
    log = logging.getLogger("eagle3")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture
def eagle3_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Calls `eagle3` with arguments; its exit code and its output, or its error where it fails."""
    from experiments.cli import main

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["eagle3", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.err if ended.value.code else said.out

    return call


@pytest.fixture
def signals() -> Iterator[None]:
    """What a test does to handlers is undone, and what signals leave behind."""
    from stages.signals import stop_on_signals

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A shell starts its background jobs with SIGINT ignored; here the handler is what is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    stop_on_signals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The repository these tests belong to."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow SQLite file with its tables and nothing in them: making one takes seconds, copying
    it does not. Shared: copy it."""
    from mlflow import MlflowClient

    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> Store:
    """A test's own MLflow store."""
    from stages.tracking import Store

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return Store(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "mlartifacts")


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-like verifier with lm_head tied to the embedding. Shared: don't write into it."""
    return make_tiny_verifier(tmp_path_factory.mktemp("verifier") / "tied", tied=True)


@pytest.fixture(scope="session")
def tiny_verifier_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an lm_head of its own. Shared: don't write into it."""
    return make_tiny_verifier(tmp_path_factory.mktemp("verifier") / "untied", tied=False, seed=1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> VerifierSpec:
    """One more in float32, in which another engine's states and answers are transformers' own.
    Shared: don't write into it."""
    from eagle3.verifier import VerifierSpec

    folder = tmp_path_factory.mktemp("verifier") / "float32"
    make_tiny_verifier(folder, tied=False, num_hidden_layers=6, dtype="float32")
    return VerifierSpec.open(folder)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A verifier and the states of all its layers. Shared: don't write into either."""
    from tests.faulty import make_lab

    return make_lab(tmp_path_factory.mktemp("lab"))
