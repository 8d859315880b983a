"""Where the project is that a command works in. Knows nothing of what lies in it."""

from __future__ import annotations

from pathlib import Path

from eagle3.errors import HarnessError


def project_root() -> Path:
    """The folder above, or this one, that holds dvc.yaml.

    Raises:
        HarnessError: there is none.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file():
            return folder
    raise HarnessError(
        "not inside the project", where=here, rule="a folder with dvc.yaml",
        fix="change into the project's folder, or one below it",
    )  # fmt: skip
