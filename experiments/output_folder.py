"""Where a command writes its result: checked before the work, not after it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from eagle3.errors import HarnessError


def check_output(folder: Path, name: str, replaceable: Collection[str]) -> None:
    """What is finished replaces what stands at its place, which must be of its kind or nothing.

    Args:
        name: of the argument, for messages.
        replaceable: files of an earlier result.

    Raises:
        HarnessError: other files are in the way, or nothing can be written there.
    """
    if folder.is_dir():
        others = sorted({path.name for path in folder.iterdir()} - set(replaceable))
        if others:
            raise HarnessError(
                f"{name} holds other files, which the result would replace",
                where=folder,
                rule="a new folder, an empty one, or an earlier result",
                got=", ".join(others[:5]),
                fix=f"{name} {folder / 'result'}",
            )
    elif folder.exists():
        raise HarnessError(
            f"{name} is a file", where=folder, rule="a folder", fix=f"another {name}"
        )
    above = next(parent for parent in folder.resolve().parents if parent.exists())
    if not above.is_dir():
        raise HarnessError(
            f"{name} lies under a file", where=above, rule="a folder", fix=f"another {name}"
        )
    try:
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError as error:
        raise HarnessError(
            f"{name} cannot be written",
            where=above,
            rule="a folder in which folders can be made",
            got=error.strerror,
            fix=f"another {name}",
        ) from None
