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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.workspace import locked, write_atomically, write_json
from experiments.graph import Graph
from experiments.inputs_check import ARM_INPUTS, WRITE_IN, check_inputs, check_sources
from experiments.renewal import repro
from experiments.settings_check import check_settings
from stages import outside
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


def _checked(root: Path, params: Mapping[str, Any], where: str) -> Graph:
    """The project's graph with these settings, which can be used and have what they name."""
    check_settings(params, where)
    graph = Graph(root, params.get("arms", {}))
    check_inputs(params, graph, where)
    check_sources(params, root, where)
    return graph


def prepare(root: Path, overlay: Path) -> Path:
    """Makes or refreshes the overlay's folder; its earlier results stay in it.

    Raises:
        HarnessError: the overlay is missing, not YAML, or makes settings that cannot be used.
    """
    where = f"{overlay} over params.yaml"
    merged = overlaid(read_params(root / "params.yaml"), read_yaml(overlay), where=overlay)
    graph = _checked(root, merged, where)
    links = _outside(graph, merged, where)
    files = project_files(root)
    copied = {*files, *(str(parent) for name in files for parent in Path(name).parents), *links}
    check_inputs(merged, graph, where, there=copied)
    folder = _folder_of(root, overlay)
    folder.mkdir(parents=True, exist_ok=True)
    origin = folder / ORIGIN_FILE
    before = set(json.loads(origin.read_text())["files"]) if origin.exists() else set()
    # What was measured apart speaks of the project's own verifier and settings.
    names = [name for name in files if not name.startswith("reports/")]
    # A note, since DVC warns of a folder without a file at every stage that reads it.
    note = "What was measured apart from the pipeline is in the project's own reports/.\n"
    write_atomically(folder / "reports" / "README", note)
    for name in names:
        _copy_changed(root / name, folder / name)
    for name in before - set(names):
        (folder / name).unlink(missing_ok=True)
    for name in links:
        _link(root / name, folder / name)
    write_atomically(folder / "params.yaml", dump_yaml(merged))
    write_json(origin, {"overlay": overlay.name, "git": git_state(root), "files": names})
    write_atomically(
        folder / ".dvc" / "config",
        "[core]\n    analytics = false\n    check_update = false\n    no_scm = true\n"
        f'[cache]\n    dir = {cache_folder(root)}\n    type = "reflink,hardlink,symlink"\n',
    )
    return folder


def _folder_of(root: Path, overlay: Path) -> Path:
    if not overlay.stem.strip("."):
        raise HarnessError(
            "an overlay's folder is named after its file, and this one has no name",
            where=overlay,
            rule="a name before .yaml",
            got=overlay.name,
            fix="rename the file",
        )
    return root / ".work" / "overlays" / overlay.stem


def _outside(graph: Graph, params: Mapping[str, Any], where: str) -> list[str]:
    """Relative paths that settings name, that are there, and that no stage makes: what of them git
    ignores is not among the files that are copied.

    Raises:
        HarnessError: one that leads out of the project: from the copy it would lead elsewhere.
    """
    named = {f"{s}.{k}": v for s in outside.KEYS for k, v in outside.named(s, params.get(s) or {})}
    arms: Mapping[str, Any] = params.get("arms") or {}
    named |= {f"arms.{name}.{key}": arm[key] for name, arm in arms.items() for key in ARM_INPUTS}
    root, found = graph.root, []
    for key, value in named.items():
        path = Path(value)
        if path.is_absolute() or not (root / path).exists():
            continue
        if ".." in path.parts:
            raise HarnessError(
                "an overlay runs in a folder of its own, from where this path leads elsewhere",
                where=f"{where}, {key}",
                rule="an absolute path, or one below the project",
                got=value,
                fix=f"{(root / path).resolve()}",
            )
        if path.parts and not graph.makes(str(path)):
            found.append(str(path))
    return found


def _link(source: Path, destination: Path) -> None:
    if destination.is_symlink() and destination.readlink() != source:
        destination.unlink()
    if not destination.exists():
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.symlink_to(source)


def run_overlay(root: Path, overlay: Path, targets: Sequence[str] = ()) -> int:
    """Runs the pipeline (or only what these stages need) under an overlay; DVC's exit code.

    Raises:
        HarnessError: see `prepare`, or another overlay of this name runs now.
    """
    folder = _folder_of(root, overlay)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whoever came second would change the settings under stages that have not begun.
    with locked(folder.with_name(f"{folder.name}.lock")) as lock:
        if lock is None:
            raise HarnessError(
                "an overlay of this name is running already",
                where=folder,
                rule="one at a time in this folder",
                got=overlay,
                fix="wait for it or stop it, or give this file another name",
            )
        try:
            return _run_in_copy(root, overlay, targets)
        finally:
            lock.unlink()


def _run_in_copy(root: Path, overlay: Path, targets: Sequence[str]) -> int:
    folder = prepare(root, overlay)
    print(f"overlay {overlay} runs in {folder}", flush=True)
    # DVC_ROOT and the current folder are the copy's there: the store is named.
    environment = {**os.environ, "MLFLOW_TRACKING_URI": resolve_store(root).uri}
    environment.pop("DVC_ROOT", None)
    # The copy's own code, whatever the console script was installed from.
    environment.pop("PYTHONPATH", None)
    return _run(folder, environment, targets)


def run_default(root: Path) -> int:
    """Runs the pipeline as params.yaml says; returns DVC's exit code."""
    _checked(root, read_params(root / "params.yaml"), "params.yaml")
    return _run(root, dict(os.environ))


def _run(folder: Path, environment: dict[str, str], targets: Sequence[str] = ()) -> int:
    if not targets:
        arms = read_params(folder / "params.yaml").get("arms", {})
        for arm in Graph(folder, arms).uncompared:
            print(
                f"arm {arm} will be trained and evaluated (metrics/{arm}.json), but will not be in "
                f"the report: {WRITE_IN.format(arm=arm)}",
                flush=True,
            )
    code = repro(folder, environment, targets)
    if code == 0 and not targets:
        print(f"\nreport:    {folder / 'report' / 'report.html'}\nMLflow UI: make ui")
    return code
