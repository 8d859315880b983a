"""Processes for tests of training: forked from one that has torch imported, so that each starts at
once. One can be killed, or several can train together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Forks:
    """Starts processes that each call one function of `tests.training_run`, and waits for them."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(
        self,
        function: str,
        folder: Path,
        *,
        ranks: int = 1,
        kill_after: float | None = None,
        **arguments: Any,
    ) -> list[int]:
        """Exit codes by rank: 2 for a HarnessError, minus the signal that ended it. What a rank
        wrote to stderr is in `folder/stderr-<rank>`.

        Args:
            kill_after: seconds until SIGKILL reaches all of them.
        """
        folder.mkdir(exist_ok=True)
        call = {
            "function": function,
            "arguments": {"folder": str(folder), **arguments},
            "ranks": ranks,
            "kill_after": kill_after,
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(call), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


@contextlib.contextmanager
def forking() -> Iterator[Forks]:
    """Forks as long as the block runs."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forking"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Forks(server)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(call: dict[str, Any], rank: int, port: int) -> int:
    from eagle3.errors import HarnessError
    from tests import training_run

    if call["ranks"] > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(call["ranks"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    folder = Path(call["arguments"]["folder"])
    with (folder / f"stderr-{rank}").open("w") as err:
        os.dup2(err.fileno(), 2)
        os.dup2(err.fileno(), 1)  # stdout is the server's answer
        try:
            getattr(training_run, call["function"])(**call["arguments"])
        except HarnessError as error:
            print(error, file=sys.stderr, flush=True)
            return 2
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    return 0


def _serve() -> None:

    import tests.training_run  # noqa: F401

    for line in sys.stdin:
        call = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(call["ranks"]):
            pid = os.fork()
            if not pid:
                os._exit(_child(call, rank, port))
            children.append(pid)
        if call["kill_after"] is not None:
            time.sleep(call["kill_after"])
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    _serve()
