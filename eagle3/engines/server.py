"""A serving engine's server: started on loopback and ended with its parent, or given by URL.

Knows no engine: whoever does makes a `Launch`. Processes are ended by `guard.py`, which this
process holds by a pipe, so that a server never outlives whoever started it, not even after SIGKILL.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field
from tqdm import tqdm

from eagle3.engines import guard
from eagle3.errors import HarnessError
from eagle3.settings import Settings

HOST = "127.0.0.1"
LAST_LINES = 15
POLL_SECONDS = 0.25
HEALTH = "/health"  # path that answers 200 as soon as requests are served
# What says in a log that a port was in use, whatever engine wrote it.
PORT_TAKEN = ("address already in use", "errno 98")


class ServerSettings(Settings):
    """Where an engine's servers are.

    Attributes:
        environment: folder of the engine's virtual environment (`make engines`).
        urls: servers that run already, or a router before them; then none is started.
        arguments: more arguments of the server's command line (`--tp-size`, `8`).
        start_seconds: how long a started server may take until it answers.
        in_flight: requests that a server works on at once.
        give_up_seconds: how long a request is tried again after a server died.
        states: folder where servers given by URL leave states, as this machine sees it.
    """

    environment: str | None = None
    urls: list[str] = Field(default_factory=list)
    arguments: list[str] = Field(default_factory=list)
    start_seconds: float = Field(default=900.0, gt=0)
    in_flight: int = Field(default=8, ge=1)
    give_up_seconds: float = Field(default=300.0, gt=0)
    states: str | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start an engine's server.

    Attributes:
        engine: its name, for messages.
        command: makes the command line for a host and port.
        environ: variables set on top of this process's.
        log: file that takes all its output; what it held is lost.
    """

    engine: str
    command: Callable[[str, int], Sequence[str | Path]]
    log: Path
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers. `process` is its guard, None for one given by URL."""

    engine: str
    url: str
    log: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """False when a server started here has ended; one given by URL counts as alive."""
        return self.process is None or self.process.poll() is None

    def last_lines(self) -> str:
        """The end of its log."""
        return last_lines(self.log) if self.log else "(a server given by URL: no log here)"

    def stop(self) -> None:
        """Ends a server started here and all its processes; returns when they have ended."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def installed_version(environment: Path, distribution: str) -> str | None:
    """Version of a distribution in a virtual environment, None without it. Starts nothing."""
    for folder in sorted(environment.glob("lib/python*/site-packages")):
        for found in metadata.distributions(name=distribution, path=[str(folder)]):
            return found.version
    return None


def engine_python(environment: Path, distributions: Sequence[str], version: str) -> Path:
    """The interpreter of an engine's environment.

    Args:
        distributions: names under which the engine may be installed.

    Raises:
        HarnessError: no such environment, the engine is not in it, or another version is.
    """
    python = environment / "bin" / "python"
    found = [installed_version(environment, name) for name in distributions]
    got = next((item for item in found if item is not None), None)
    if not python.exists() or got is None:
        raise HarnessError(
            "the serving engine is not installed", where=environment,
            rule=f"a virtual environment with {' or '.join(distributions)} {version}",
            got="no such environment" if not python.exists() else "the environment without it",
            fix="run `make engines`, name another environment, or give the URL of a server",
        )  # fmt: skip
    check_engine_version(got, distributions[0], version, environment)
    return python.absolute()


def check_engine_version(got: str, engine: str, version: str, where: object) -> None:
    """Refuses another version than the one this project knows; its build does not matter.

    Args:
        where: the environment or the server.
    """
    if got.split("+")[0] != version:
        raise HarnessError(
            "the serving engine has another version than this project knows", where=where,
            rule=f"{engine} {version}", got=got, fix="run `make engines` again, and a server anew",
        )  # fmt: skip


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A loopback port that nobody else is given for the length of a block.

    Bound and never listened at: Linux gives it to no other search for a free port, and lets a
    server listen at it that sets SO_REUSEADDR, as engines' servers do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        yield holder.getsockname()[1]


def start_server(launch: Launch, *, seconds: float = 900.0) -> Server:
    """Starts a server on loopback and waits until it answers, with a line of progress.

    Args:
        seconds: until it has to answer.

    Raises:
        HarnessError: the server ended (its last lines are shown) or does not answer in time.
            Nothing of it is left running then.
    """
    # Held until the server listens: a start beside this one would find the same port free, and
    # take the first server's answers for its own.
    with held_port() as port:
        return _start(launch, seconds, port)


def _start(launch: Launch, seconds: float, port: int) -> Server:
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    # Isolated from this project's packages: the engine has an environment of its own.
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [str(part) for part in launch.command(HOST, port)]
    with launch.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environ, **launch.environ},
            start_new_session=True,  # a Ctrl-C reaches the asker alone, who ends the server
        )
    server = Server(
        engine=launch.engine, url=f"http://{HOST}:{port}", log=launch.log, process=process
    )
    try:
        _wait(server, seconds, port)
    except BaseException:
        server.stop()
        raise
    return server


def _wait(server: Server, seconds: float, port: int) -> None:
    started = time.monotonic()
    form = "{desc} {elapsed}"
    with tqdm(desc=f"{server.engine} starts on {HOST}:{port}", bar_format=form, total=1) as bar:
        while True:
            if not server.alive:
                lines = server.last_lines()
                taken = any(word in lines.lower() for word in PORT_TAKEN)
                raise HarnessError(
                    f"the {server.engine} server ended before it answered"
                    + (": its port is taken" if taken else ""),
                    where=server.log, rule=f"200 at {HEALTH}", got=f"its last lines\n{lines}",
                    fix="run the same again: each start looks for a free one"
                    if taken
                    else "look for the cause in its log; flags of the server are server.arguments",
                )  # fmt: skip
            if answers(server.url):
                bar.set_description_str(f"{server.engine} answers on {HOST}:{port} after")
                return
            if time.monotonic() - started > seconds:
                raise HarnessError(
                    f"the {server.engine} server does not answer", where=server.log,
                    rule=f"an answer within {seconds:.0f} s",
                    got=f"its last lines\n{server.last_lines()}", fix="raise start_seconds",
                )  # fmt: skip
            if sys.stderr.isatty():
                bar.refresh()
            time.sleep(POLL_SECONDS)


def given_server(engine: str, url: str) -> Server:
    """A server that runs already.

    Raises:
        HarnessError: it does not answer.
    """
    url = url.rstrip("/")
    if not answers(url, seconds=10.0):
        raise HarnessError(
            f"no {engine} server answers", where=url, rule=f"200 at {HEALTH}",
            fix="start it, or correct the URL",
        )  # fmt: skip
    return Server(engine=engine, url=url)


@contextlib.contextmanager
def running(launch: Launch, *, seconds: float = 900.0) -> Iterator[Server]:
    """A started server for the length of a block."""
    server = start_server(launch, seconds=seconds)
    try:
        yield server
    finally:
        server.stop()


def answers(url: str, *, seconds: float = 5.0) -> bool:
    """Whether a server says that it is well."""
    try:
        with _open(urllib.request.Request(url + HEALTH), seconds) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):  # refused, reset, timed out, or a status of 400 and up
        return False


def ask(url: str, path: str, body: object | None = None, *, seconds: float = 600.0) -> Any:
    """JSON of a server: GET, or POST with a body.

    Raises:
        OSError: no connection, or it broke.
        HarnessError: the server refuses the request; its own words are shown.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with _open(request, seconds) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:2000]
        if error.code == 429 or error.code >= 500:  # overloaded or ending: worth another try
            raise ConnectionError(f"{error.code} from {url}{path}: {text}") from None
        raise HarnessError(
            "the server refuses a request",
            where=url + path,
            rule="a server of this verifier, with room for the longest document",
            got=f"{error.code}: {text}",
            fix="start it anew for what it refuses, by its own words; or name another",
        ) from None
    except http.client.HTTPException as error:  # it ended in the middle of its answer
        raise ConnectionError(f"{url}{path}: {type(error).__name__} {error}") from None


def _open(request: urllib.request.Request, seconds: float) -> Any:
    # Without a proxy: loopback and a cluster's own hosts are never behind one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=seconds)


def last_lines(log: Path) -> str:
    """The end of a log, indented for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return f"    (no log: {error})"
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines()[-LAST_LINES:])
