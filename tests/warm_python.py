"""A `python` for tests of the pipeline that starts warm.

Twenty and more stages, each a process of its own, would spend minutes on importing torch,
transformers and MLflow. This server has them imported; a `python -m stages.x` on its PATH hands
arguments, folder, environment and output to it, and it forks. The forked process imports the
project's own code from its current folder, as any `python -m` does. Other command lines go to the
real interpreter.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

MODULES = (
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "ruamel.yaml",
    "scipy.stats",
    "jinja2",
)

SHIM = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1:2] != ["-m"] or not sys.argv[2].startswith("stages."):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    about = {{"argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}}
    socket.send_fds(server, [b"x"], [0, 1, 2])
    server.sendall(json.dumps(about).encode() + b"\\n")
    code = server.makefile().readline()
sys.exit(int(code or 1))
"""


def serve(address: str) -> None:
    """Forks a process for each connection, one after another, until it is killed."""
    for name in MODULES:
        __import__(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
                about = json.loads(connection.makefile().readline())
                child = os.fork()
                if child == 0:
                    listener.close()
                    _become(about, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())


def _become(about: dict, descriptors: list[int]) -> None:  # type: ignore[type-arg]
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.chdir(about["cwd"])
    os.environ.clear()
    os.environ.update(about["env"])
    sys.argv = [about["argv"][0], *about["argv"][1:]]
    sys.path[0] = about["cwd"]
    code = 0
    try:
        runpy.run_module(about["argv"][0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class WarmPython:
    """The server, and `folder/bin` to put first on a PATH."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        address = folder / "socket"
        shim = self.bin / "python"
        shim.write_text(SHIM.format(python=sys.executable, address=str(address)))
        shim.chmod(0o755)
        # From an empty folder: the server itself must not find any project's code.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve()), str(address)], cwd=folder
        )
        while not address.exists():
            if self._process.poll() is not None:
                raise RuntimeError("the warm python ended before it began")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the server."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


if __name__ == "__main__":
    serve(sys.argv[1])
