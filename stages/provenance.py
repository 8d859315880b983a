"""Where a stage's results come from: code, machine, inputs and time, for provenance/<stage>.json.

Reads git, dvc.lock and the installed packages. Knows nothing of what a stage computes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3.workspace import digest_file

# DVC rewrites or deletes these while it runs stages: their state says nothing about the code.
REWRITTEN_BY_DVC = ("dvc.lock", "metrics/", "report/", "provenance/", "checkpoints/", "data/")
# What an overlay's folder says about the tree that it was copied from (see experiments/overlay.py).
ORIGIN_FILE = ".origin.json"
LONGEST_DIFF = 200_000  # characters


def _git(root: Path, *command: str) -> str | None:
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
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None, "changed": [], "diff": None}
    excluded = [f":(exclude){path}" for path in REWRITTEN_BY_DVC]
    # -z: names with blanks or other letters come unquoted; a rename is followed by its old name.
    status = _git(root, "status", "--porcelain", "-z", "--no-renames", "--", ".", *excluded) or ""
    changed = sorted(entry[3:] for entry in status.split("\0") if entry)
    diff = _git(root, "diff", "HEAD", "--", ".", *excluded) if changed else ""
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


def lock_digests(root: Path) -> dict[str, str]:
    """DVC's digest of every stage output that dvc.lock knows, by path."""
    path = root / "dvc.lock"
    if not path.is_file():
        return {}
    from stages.params import read_yaml

    stages = read_yaml(path).get("stages", {})
    return {
        out["path"]: out["md5"]
        for stage in stages.values()
        for out in stage.get("outs", [])
        if "md5" in out
    }


def input_digests(root: Path, arguments: Iterable[object]) -> dict[str, str]:
    """The digests of those outputs of earlier stages that arguments or settings name."""
    known = lock_digests(root)
    named = {str(value).rstrip("/") for value in arguments if isinstance(value, str | Path)}
    return {path: known[path] for path in sorted(named & known.keys())}


def describe(root: Path, *, threads: int) -> dict[str, Any]:
    """What can be said before a stage has run."""
    lock = root / "requirements.lock"
    return {
        **git_state(root),
        "command": " ".join(["python -m", f"stages.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "lock": digest_file(lock) if lock.is_file() else None,
    }
