"""Another setting of the whole pipeline, in a place of its own.

An overlay is a YAML file with the keys of params.yaml that differ. The project's files are copied
to `.work/overlays/<name>/`, the overlay is merged into the copy's params.yaml, and `dvc repro` runs
there on the project's DVC cache: stages that the overlay does not touch come out of the run cache,
and the project's own results stay as they are. Runs go to the project's MLflow store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.workspace import write_atomically, write_json
from experiments.renewal import repro
from experiments.settings_check import (
    WRITE_IN,
    check_inputs,
    check_settings,
    check_sources,
    uncompared,
)
from stages.params import dump_yaml, overlaid, read_params, read_yaml
from stages.provenance import ORIGIN_FILE, git_state
from stages.tracking import resolve_store

# The copy's own: written here, or by DVC while it runs there.
OWN_FILES = ("params.yaml", "dvc.lock", "metrics/summary.json")


def project_files(root: Path) -> list[str]:
    """The files of a git work tree, new ones that git does not ignore included.

    Raises:
        HarnessError: no git work tree.
    """
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise HarnessError(
            "an overlay needs the project as a git work tree",
            where=root,
            rule="a folder that git tracks",
            got=getattr(error, "stderr", "").strip() or str(error),
            fix="clone the project with git, or `git init` and commit it",
        ) from None
    names = sorted(set(listed.stdout.split("\0")) - {""})
    return [
        name
        for name in names
        if name not in OWN_FILES and not name.startswith(".dvc/") and (root / name).is_file()
    ]


def _copy_changed(source: Path, destination: Path) -> None:
    # A file that is the same keeps its time, so that DVC need not read it again.
    if destination.is_file() and destination.read_bytes() == source.read_bytes():
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, destination)


def cache_folder(root: Path) -> Path:
    """Where the project's DVC cache is."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "cache", "dir"], cwd=root, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise HarnessError(
            "not a DVC project",
            where=root,
            rule="a folder with .dvc/",
            got=done.stderr.strip(),
            fix="run `dvc init` there, or change into the project's folder",
        )
    return (root / done.stdout.strip()).resolve()


Check = Callable[[Mapping[str, Any], str], None]


def prepare(root: Path, overlay: Path, check: Check = check_settings) -> Path:
    """Makes or refreshes the overlay's folder; its earlier results stay in it.

    Raises:
        HarnessError: the overlay is missing, not YAML, or makes settings that `check` refuses.
    """
    merged = overlaid(read_params(root / "params.yaml"), read_yaml(overlay), where=overlay)
    check(merged, f"{overlay} over params.yaml")
    check_inputs(merged, root, f"{overlay} over params.yaml")
    check_sources(merged, root, f"{overlay} over params.yaml")
    folder = root / ".work" / "overlays" / overlay.stem
    folder.mkdir(parents=True, exist_ok=True)
    origin = folder / ORIGIN_FILE
    before = set(json.loads(origin.read_text())["files"]) if origin.exists() else set()
    # What was measured apart speaks of the project's own verifier and settings.
    names = [name for name in project_files(root) if not name.startswith("reports/")]
    # A note, since DVC warns of a folder without a file at every stage that reads it.
    note = "What was measured apart from the pipeline is in the project's own reports/.\n"
    write_atomically(folder / "reports" / "README", note)
    for name in names:
        _copy_changed(root / name, folder / name)
    for name in before - set(names):
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / "params.yaml", dump_yaml(merged))
    write_json(origin, {"overlay": overlay.name, "git": git_state(root), "files": names})
    write_atomically(
        folder / ".dvc" / "config",
        "[core]\n    analytics = false\n    check_update = false\n    no_scm = true\n"
        f'[cache]\n    dir = {cache_folder(root)}\n    type = "reflink,hardlink,symlink"\n',
    )
    return folder


def run_overlay(
    root: Path, overlay: Path, check: Check = check_settings, targets: Sequence[str] = ()
) -> int:
    """Runs the pipeline (or only what these stages need) under an overlay; DVC's exit code."""
    folder = prepare(root, overlay, check)
    print(f"overlay {overlay} runs in {folder}", flush=True)
    # DVC_ROOT and the current folder are the copy's there: the store is named.
    environment = {**os.environ, "MLFLOW_TRACKING_URI": resolve_store(root).uri}
    environment.pop("DVC_ROOT", None)
    # The copy's own code, whatever the console script was installed from.
    environment.pop("PYTHONPATH", None)
    return _run(folder, environment, targets)


def run_default(root: Path) -> int:
    """Runs the pipeline as params.yaml says; returns DVC's exit code."""
    params = read_params(root / "params.yaml")
    check_settings(params, "params.yaml")
    check_inputs(params, root, "params.yaml")
    check_sources(params, root, "params.yaml")
    return _run(root, dict(os.environ))


def _run(folder: Path, environment: dict[str, str], targets: Sequence[str] = ()) -> int:
    if not targets:
        for arm in uncompared(read_params(folder / "params.yaml"), folder):
            print(
                f"arm {arm} will be trained and evaluated (metrics/{arm}.json), but will not be in "
                f"the report: {WRITE_IN.format(arm=arm)}",
                flush=True,
            )
    code = repro(folder, environment, targets)
    if code == 0 and not targets:
        print(f"\nreport:    {folder / 'report' / 'report.html'}\nMLflow UI: make ui")
    return code
