"""Runs a command so that it and all it starts end when whoever asked for it does.

Standard library only: `python guard.py COMMAND…` holds its standard input open as a lifeline. At
its end of file (the asker closed it or died, however it died), at SIGTERM or SIGINT, or when the
command ends, every process that the command left is ended: first asked, then killed. Orphans come
to the guard (it is their subreaper), so that none is missed, whatever its process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_SECONDS = 10.0


def main(command: list[str]) -> int:
    """Returns the command's exit status; 128 + n where signal n ended it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # Should the guard itself be killed, the command dies with it.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    lifeline = sys.stdin.fileno()
    while child.poll() is None:
        ready, _, _ = select.select([lifeline, read], [], [])
        if lifeline in ready and not os.read(lifeline, 4096):
            break
        if read in ready and set(os.read(read, 4096)) - {signal.SIGCHLD}:
            break
    _end_all(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all(child: subprocess.Popen[bytes]) -> None:
    """Asks what is left to end, and kills what does not."""
    deadline = time.monotonic() + GRACE_SECONDS
    for pid in _descendants():
        _send(pid, signal.SIGTERM)
    while child.poll() is None or _descendants():
        if time.monotonic() > deadline:
            for pid in _descendants():
                _send(pid, signal.SIGKILL)
        _reap(child)
        time.sleep(0.05)


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collects ended orphans; the command's own status is left to `child`."""
    for pid in _children(os.getpid()):
        if pid != child.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _descendants() -> list[int]:
    """Pids of all processes below this one, an ended one that nobody collected included."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(word) for word in task.read_text().split()]
        except OSError:  # the process or the thread ended meanwhile
            continue
    return children


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
