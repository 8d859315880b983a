"""Turn-taking between a benchmark and the processes that it measures.

Each measured program runs in a process of its own, so that its peak memory is its own, and works
in rounds of equal size: the benchmark lets one run a round while the others wait, then the next.
Standard library alone: one side may run in another environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any


def peak_rss() -> int:
    """Most bytes of memory that this process has held.

    Linux's own count of this program; getrusage's goes on from the process that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Turns:
    """The measured side. Takes standard output for itself; what others print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._wall = self._cpu = 0.0

    def begin(self) -> None:
        """Waits for its turn. Ends the process if nobody is there to give it one."""
        if not sys.stdin.readline():
            os._exit(1)
        self._wall, self._cpu = perf_counter(), process_time()

    def end(self) -> None:
        """Reports the round: seconds, seconds of all its threads, bytes of peak memory so far."""
        report = {
            "wall_s": perf_counter() - self._wall,
            "cpu_s": process_time() - self._cpu,
            "peak_rss": peak_rss(),
        }
        print(json.dumps(report), file=self._out, flush=True)


class Measured:
    """The benchmark's side: one process that works in rounds.

    Args:
        log: file that takes what the process says on stderr.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=env,
                cwd=cwd,
            )

    def round(self) -> dict[str, float]:
        """Lets it work one round.

        Raises:
            RuntimeError: it ended; with the last lines that it said.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print("go", file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(self._last_words())
        report: dict[str, Any] = json.loads(line)
        return report

    def finish(self) -> None:
        """Lets it go on to its end.

        Raises:
            RuntimeError: it failed; with the last lines that it said.
        """
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        if self._process.wait():
            raise RuntimeError(self._last_words())

    def stop(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _last_words(self) -> str:
        self.stop()
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([f"a measured process failed, {self._log}:", *lines[-20:]])
