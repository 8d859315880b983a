"""The console script: quick help, messages instead of tracebacks, and a page for MLflow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.errors import HarnessError
from experiments import sync_command
from experiments.ui import free_port

CLI = [sys.executable, "-c", "from experiments.cli import main; main()"]
FLAGS = [
    "--verifier-path",
    "--data-dir",
    "--vocab-mapping-dir",
    "--output-dir",
    "--epochs",
    "--lr",
    "--max-seq-len",
    "--ttt-steps",
    "--noise-std",
    "--val-ratio",
    "--scheduler",
    "--warmup-ratio",
    "--num-workers",
    "--finetune-from",
]


def call(*arguments: str, cwd: Path, root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    return subprocess.run(
        [*CLI, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_help_is_quick(project_root: Path) -> None:
    """Half a second of processor time at most: wall time is the neighbours' too."""
    before = os.times()
    done = call("--help", cwd=project_root, root=project_root)
    after = os.times()
    assert done.returncode == 0 and "train" in done.stdout
    used = after.children_user - before.children_user + after.children_system
    assert used - before.children_system < 0.5


@pytest.mark.parametrize("turned", [True, False], ids=["turned into an error", "plain"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_line(
    eagle3_says: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    signals: None,
    number: int,
    turned: bool,
) -> None:
    def stopped(root: Path) -> None:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if turned:
                raise ValueError("of code in C") from None
            raise

    monkeypatch.setattr(sync_command, "run", stopped)
    assert eagle3_says("sync") == (130, "stopped; the same command takes up what is finished\n")


def test_train_takes_the_flags_of_existing_scripts(project_root: Path) -> None:
    done = call("train", "--help", cwd=project_root, root=project_root)
    assert [flag for flag in FLAGS if flag not in done.stdout] == []


def test_help_imports_nothing_heavy(project_root: Path) -> None:
    heavy = {"torch", "mlflow", "transformers", "dvc", "optuna"}
    code = f"import sys, experiments.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_a_known_mistake_is_a_message(tmp_path: Path, project_root: Path) -> None:
    done = call("repro", "--params", "x.yaml", cwd=tmp_path, root=project_root)
    assert done.returncode == 2
    assert done.stderr.startswith("eagle3: not inside the project") and "where" in done.stderr


def test_children_find_this_python(project_root: Path) -> None:
    """DVC's command lines say `python`: called by its path, the environment not activated."""
    code = "import shutil, experiments.cli as c; c.app = lambda: print(shutil.which('python'))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; c.main()"],
        cwd=project_root,
        env={**os.environ, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(Path(sys.executable).parent / "python")


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(HarnessError, match="port is taken"):
            free_port(taken.getsockname()[1])
    assert free_port(None) > 0


@pytest.mark.slow
def test_the_page_ends_with_its_parent(tmp_path: Path, project_root: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    port = free_port(0)
    parent = subprocess.Popen(
        [*CLI, "ui", "--port", str(port)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(project_root)},
    )

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        except OSError:
            return False

    try:
        deadline = time.monotonic() + 120
        while not answers():
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.2)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    while answers():
        assert time.monotonic() < deadline
        time.sleep(0.2)
