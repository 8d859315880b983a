"""Programs that are stopped: children end with them, and end by themselves where they can."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.signals import trouble_with_disk

PARENT = """
import os, sys
from pathlib import Path
from stages.signals import run_child
child = "import os, sys, time; print(os.getpid(), flush=True); " + sys.argv[1]
try:
    raise SystemExit(run_child([sys.executable, "-c", child], cwd=Path.cwd(), env=os.environ))
except KeyboardInterrupt:
    raise SystemExit("stopped")
"""
SLEEP = "time.sleep(60)"
PATIENT = """
import signal
def end(*_):
    time.sleep(0.5)
    print("ended well", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
time.sleep(60)
"""


def start(root: Path, child: str) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to children is Linux's")
def test_a_child_ends_with_a_killed_parent(project_root: Path) -> None:
    parent, child = start(project_root, SLEEP)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# A stage: it imports for a while, and only then asks to end with its parent.
IMPORTING = """
import os, sys, time
if os.fork():
    time.sleep(60)
else:
    exec(sys.argv[1])
"""
STAGE = """
import stages
parent = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
from stages.signals import stop_on_signals
os.environ["DVC_ROOT"] = "."
try:
    stop_on_signals()
    time.sleep(60)
except KeyboardInterrupt:
    print("ended", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word to children is Linux's")
def test_a_stage_ends_whose_parent_was_killed_while_it_imported(project_root: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", IMPORTING, STAGE],
        cwd=project_root,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        assert select.select([parent.stdout], [], [], 20)[0], "the stage goes on without its parent"
        assert parent.stdout.readline() == "ended\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("whole_terminal", [True, False])
def test_a_child_ends_in_its_own_time(project_root: Path, whole_terminal: bool) -> None:
    """Ctrl-C goes to both, `kill` to the parent: either way the child's ending is waited for, and
    is a stop, whatever code the child makes of it."""
    parent, _ = start(project_root, PATIENT)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    if whole_terminal:
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.terminate()
    assert parent.stdout.read() == "ended well\nstopped\n"
    assert parent.wait() == 1


def test_a_copy_to_a_full_disk_is_named(tmp_path: Path) -> None:
    """shutil.copytree gathers what went wrong, file by file, into an error without a number."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("x")

    def full(source: str, out: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", out)

    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=full)
    told = str(trouble_with_disk(caught.value))
    assert told.startswith("no room left on the disk")
    assert f"got: [Errno {errno.ENOSPC}] No space left on device" in told
    assert trouble_with_disk(shutil.Error("something else\nin two lines")) is None


def test_a_database_on_a_full_disk_is_named() -> None:
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as database,
        pytest.raises(sqlite3.OperationalError) as caught,
    ):
        database.execute("PRAGMA max_page_count = 1")
        database.execute("CREATE TABLE a (b)")
    wrapped = RuntimeError("an exception is raised during the commit")
    wrapped.__cause__ = caught.value
    for error in (caught.value, wrapped):
        told = str(trouble_with_disk(error))
        assert told.startswith("no room left on the disk") and "database or disk is full" in told


def test_a_path_that_is_too_long_is_named() -> None:
    with pytest.raises(OSError) as caught:
        Path("x" * 5000).is_file()
    told = str(trouble_with_disk(caught.value))
    assert told.startswith("a path is longer than the file system takes\n  where: xxx")
    assert "fix: correct the path" in told and len(told) < 700


@pytest.mark.parametrize("below", ["", "tracking/run"])
def test_a_file_where_a_folder_belongs_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / ".work"
    file.write_text("mine")
    with pytest.raises(OSError) as caught:
        (file / below).mkdir(parents=True, exist_ok=True)
    told = str(trouble_with_disk(caught.value))
    assert told.startswith(f"a file stands where a folder belongs\n  where: {file}\n")
    with pytest.raises(FileExistsError) as caught:
        tmp_path.mkdir()  # a folder is there: no trouble of this kind
    assert trouble_with_disk(caught.value) is None
