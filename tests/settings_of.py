"""params.yaml as tests write and change it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.params import dump_yaml, overlaid, read_params


def write_settings(folder: Path, project_root: Path, changes: Mapping[str, Any]) -> None:
    """The project's own with others over them, and a pipeline of no stage, by which commands know
    the folder for a project."""
    (folder / "dvc.yaml").write_text("stages: {}\n")
    _write(folder / "params.yaml", read_params(project_root / "params.yaml"), changes)


def change(project: Path, **sections: Any) -> None:
    """Puts keys into its params.yaml."""
    path = project / "params.yaml"
    _write(path, read_params(path), sections)


def _write(path: Path, params: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    path.write_text(dump_yaml(overlaid(params, changes, where=Path("test"))))
