"""Small pipelines under DVC and git, which need a second to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# What `dvc init` would write; a test that wants something else gives the file itself.
DVC_FILES = {
    ".dvc/config": "[core]\n    analytics = false\n    check_update = false\n",
    ".dvc/.gitignore": "/cache\n/tmp\n/config.local\n",
}
WHO = ("-c", "user.name=a", "-c", "user.email=a@example.com")


def path_with_python() -> str:
    """A PATH on which `python` is the one of these tests, as command lines of dvc.yaml want it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def write_pipeline(root: Path, files: Mapping[str, str]) -> None:
    """Texts by path, and DVC's own files."""
    for name, text in {**DVC_FILES, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def git(root: Path, *command: str) -> str:
    """What a git command prints."""
    return subprocess.run(
        ["git", *WHO, *command], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def commit_all(root: Path) -> None:
    """All of a folder as the first commit of a new repository."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        git(root, *command)


def dvc(root: Path, *command: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs a DVC command to its good end."""
    environment = {**(environment or os.environ), "PATH": path_with_python()}
    subprocess.run([sys.executable, "-m", "dvc", *command], cwd=root, env=environment, check=True)
