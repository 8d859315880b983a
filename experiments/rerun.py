"""Stages once more, from a clean clone of HEAD, with nothing of their earlier results at hand.

The clone has the project's dvc.lock, takes inputs that are not made again out of the project's DVC
cache, and writes nothing into it. Its MLflow runs go to a store inside the clone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3.errors import HarnessError
from stages.dvc_files import Cache, Entry
from stages.signals import run_child

COMMITTED = ("dvc.yaml", "params.yaml", ".dvc/config")
STDERR = 2  # the verdict alone goes to stdout


def in_order(lock: Mapping[str, Entry], names: Sequence[str]) -> list[str]:
    """The stages named, each after those that it reads from."""
    done: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        for other in lock:
            if other != name and _reads(lock[name], lock[other]):
                visit(other)
        done.append(name)

    for name in lock:
        visit(name)
    return [name for name in done if name in names]


def inputs(lock: Mapping[str, Entry], names: Sequence[str]) -> list[str]:
    """Paths that the stages named read, that other stages make and none of them does."""
    read = {path for name in names for path in lock[name].deps}

    def made(path: str, by: Sequence[str] | Mapping[str, Entry]) -> bool:
        return any(path == o or path.startswith(f"{o}/") for n in by for o in lock[n].outs)

    return sorted(path for path in read if made(path, lock) and not made(path, names))


def _reads(one: Entry, other: Entry) -> bool:
    return any(
        path == out or path.startswith(f"{out}/") or out.startswith(f"{path}/")
        for path in one.deps
        for out in other.outs
    )


def clone(root: Path, place: Path) -> Path:
    """HEAD in `place`/project, on the project's cache, with its dvc.lock.

    Raises:
        HarnessError: no git work tree, or one whose commit does not have the pipeline.
    """
    project = place / "project"
    done = subprocess.run(
        ["git", "clone", "-q", "--no-tags", str(root), str(project)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise HarnessError(
            "verifying needs the project in git",
            where=root,
            rule="a git work tree with a commit",
            got=done.stderr.strip(),
            fix="clone the project with git, or `git init` and commit it",
        )
    if missing := [name for name in COMMITTED if not (project / name).is_file()]:
        raise HarnessError(
            "verifying runs what is committed, and the pipeline is not",
            where=root,
            rule=f"{', '.join(COMMITTED)} in the commit that HEAD names",
            got=f"a commit without {', '.join(missing)}, or no commit yet",
            fix="commit them",
        )
    # Engines are part of the machine: the clone uses those that are installed.
    with (project / ".git" / "info" / "exclude").open("a") as ignored:
        for engine in sorted(root.glob(".venv-*")):
            (project / engine.name).symlink_to(engine)
            ignored.write(f"/{engine.name}\n")
    (project / "dvc.lock").write_bytes((root / "dvc.lock").read_bytes())
    (project / ".dvc" / "config.local").write_text(
        f"[cache]\n    dir = {Cache(root).folder}\n[core]\n    analytics = false\n"
    )
    return project


def _first_error(said: str) -> str:
    """What DVC names first; after it come advice and its address."""
    first = next((line for line in said.splitlines() if line.startswith("ERROR: ")), "")
    return first and f" (dvc checkout: {first.removeprefix('ERROR: ').rstrip(':')})"


def rerun(project: Path, lock: Mapping[str, Entry], names: Sequence[str]) -> int:
    """Runs the stages, in the order given; returns DVC's exit code.

    Raises:
        HarnessError: an input is not in the cache.
    """
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{project / 'mlflow.db'}"}
    for name in ("DVC_ROOT", "DVC_EXP_NAME", "DVC_EXP_BASELINE_REV", "PYTHONPATH"):
        environment.pop(name, None)
    dvc = [sys.executable, "-m", "dvc"]
    if needed := inputs(lock, names):
        done = subprocess.run(
            [*dvc, "checkout", *needed],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
        )
        if missing := [path for path in needed if not (project / path).exists()]:
            raise HarnessError(
                "what the stages read is not in DVC's cache",
                where=Cache(project).folder,
                rule="the inputs of the stages, as a run here left them",
                got=f"without {', '.join(missing)}{_first_error(done.stderr)}",
                fix="`make repro` first; or verify the stages that make these too",
            )
    command = [*dvc, "repro", "--single-item", "--force", "--no-run-cache", "--no-commit", *names]
    return run_child(command, cwd=project, env=environment, stdout=STDERR)
