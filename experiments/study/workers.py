"""Several workers on one store: processes that end with the one that started them.

Each loads the data itself (the shards are memory-mapped, so memory holds them once). Knows nothing
of what the slots are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eagle3.errors import HarnessError
from experiments.study.progress import Board, say
from stages.signals import STOPPED, end_with_parent

POLL_SECONDS = 1.0


def run_workers(
    count: int, command: Sequence[str], *, root: Path, logs: Path, board: Board
) -> None:
    """Runs so many processes of one command line and shows what they do until all have ended.

    Args:
        command: what comes after `python -m experiments.study`.

    Raises:
        HarnessError: none of them came to a good end.
    """
    logs.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    children = []
    for number in range(count):
        with (logs / f"worker-{number}.log").open("ab") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", "experiments.study", *command],
                cwd=root,
                env=environment,
                stdout=file,
                stderr=file,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        children.append(child)
    say(f"{count} workers begin, processes {', '.join(str(c.pid) for c in children)}; logs: {logs}")
    try:
        _watch(children, board)
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            child.wait()
    board.update()
    codes = [child.returncode for child in children]
    if 0 not in codes:
        raise HarnessError(
            "all workers ended before the study did",
            where=logs,
            rule="one that ends well",
            got=f"exit codes {codes}",
            fix="look into their logs; the same command goes on from here",
        )


def _watch(children: Sequence[subprocess.Popen[bytes]], board: Board) -> None:
    alive = set(range(len(children)))
    while alive:
        time.sleep(POLL_SECONDS)
        board.update()
        for number in sorted(alive):
            code = children[number].poll()
            if code is None:
                continue
            alive.discard(number)
            if code not in (0, STOPPED):
                say(f"worker {number} ended with {code}; its slot goes to another")
