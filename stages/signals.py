"""How a program of the project ends early: by Ctrl-C, by `kill`, with its parent, on a full disk.

Knows nothing of stages. Linux only where it says so; elsewhere those parts do nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from eagle3.errors import HarnessError
from stages import FIRST_PARENT

STOPPED = 130  # what shells report of a program that Ctrl-C ended
_PR_SET_PDEATHSIG = 1
_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DATABASE = "database or disk is full"
_NAMES = (errno.ENAMETOOLONG,)
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)


def end_with_parent(parent: int) -> None:
    """Asks Linux for SIGTERM when the parent dies, however it dies.

    Args:
        parent: its process id as it was at first: one that has died meanwhile sends no signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


_asked_to_stop = threading.Event()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _asked_to_stop.set()
    raise KeyboardInterrupt


def is_stop(error: BaseException) -> bool:
    """Whether a program ends because it was asked to: code in C may make an error of its own out of
    the KeyboardInterrupt that meets it there."""
    return isinstance(error, KeyboardInterrupt) or _asked_to_stop.is_set()


def stop_on_signals() -> None:
    """SIGTERM ends the program as Ctrl-C does; under DVC or torchrun also the end of those does."""
    if threading.current_thread() is not threading.main_thread():
        return
    _asked_to_stop.clear()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as of a shell's background jobs
        signal.signal(signal.SIGINT, _interrupt)
    if "DVC_ROOT" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(FIRST_PARENT)


def ignore_stop_signals() -> None:
    """From here on the program ends by itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run_child(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: int | None = None
) -> int:
    """Runs a program to its end; returns its exit code.

    Ctrl-C reaches the child by the terminal, and it ends in its own time; SIGTERM is handed on. It
    ends when this process is killed.

    Args:
        stdout: a file descriptor for what it prints; None: this process's own.

    Raises:
        KeyboardInterrupt: one of the two came, and the child did not come to a good end.
    """
    stops: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        if number == signal.SIGTERM:
            child.terminate()

    ending = partial(end_with_parent, os.getpid())
    child = subprocess.Popen(command, cwd=cwd, env=dict(env), stdout=stdout, preexec_fn=ending)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stops and code:
        raise KeyboardInterrupt
    return code


def trouble_with_disk(error: BaseException) -> HarnessError | None:
    """What a person can do about an error of the file system; None for any other error."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        text = str(error.args[0][0][2])  # of a folder's copy: what became of its first file
    if number is None:
        # Kept in the text alone: "... (os error 28)" by safetensors, "[Errno 28] ..." by shutil.
        kinds = {"SafetensorError": "os error {})", "Error": "[Errno {}]"}
        if form := kinds.get(type(error).__name__):
            number = next((n for n in (*_ROOM, *_RIGHTS) if form.format(n) in text), None)
    # SQLite's own words, under those of whoever asked it.
    for said in map(str, (error, error.__cause__)):
        if _FULL_DATABASE in said:
            number, text = errno.ENOSPC, said.splitlines()[0]
    if number in _ROOM:
        what, fix = "no room left on the disk", "make room and run the same command again"
    elif number in _RIGHTS:
        what, fix = "a file may not be written or read", "correct the folder's rights or the path"
    elif number in _NAMES:
        what, fix = "a path is longer than the file system takes", "correct the path"
        text = f"{text[:160]}…"
    elif number in _NO_FOLDER and (file := _file_on_the_way(error)):
        what, fix = "a file stands where a folder belongs", "move it away or correct the path"
        return HarnessError(what, where=file, got=text, fix=fix)
    else:
        return None
    where = str(getattr(error, "filename", None) or f"writing below {Path.cwd()}")[:300]
    return HarnessError(what, where=where, got=text, fix=f"{fix}; finished work is kept")


def _file_on_the_way(error: BaseException) -> Path | None:
    """What is no folder on the way to the path that an error names, or at its end."""
    named = Path(str(getattr(error, "filename", None) or ""))
    there = next(path for path in (named, *named.parents) if path.exists())
    return None if there.is_dir() else there
