"""Work that outlives a crash: a folder to work in, and publishing in one step.

Pipelines delete a stage's outputs before they run it again, so nothing that a rerun could resume
may lie there. A stage works in `.work/<stage>-<hash of all it depends on>/` and moves what is
finished into place at the end. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError


def digest(value: object) -> str:
    """SHA-256 of a JSON value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def work_folder(root: Path, stage: str, key: Mapping[str, Any]) -> Iterator[Path]:
    """Opens `.work/<stage>-<hash of key>/` for one process; it is deleted when the block succeeds.

    What a crashed run left under the same key is still there when the next one opens it. Folders
    of the same stage under other keys are left alone: an interrupted run of other settings can
    still be taken up.

    Raises:
        HarnessError: another process works in the same folder now.
    """
    folder = root / ".work" / f"{stage}-{digest(key)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HarnessError(
                f"stage {stage} with the same settings is running already",
                where=folder,
                fix="wait for it or stop it; its work is kept",
            ) from None
        try:
            yield folder
        except BaseException:
            if not any(folder.iterdir()):  # nothing was begun: nothing to take up
                folder.rmdir()
                Path(lock.name).unlink()
            raise
        shutil.rmtree(folder)
        Path(lock.name).unlink()


def publish(source: Path, destination: Path) -> None:
    """Moves a finished file or folder into place, whole.

    A file replaces what stood there in one step. A folder takes two renames: killed between them,
    what stood there lies beside as `.<name>.old` and nothing at the destination. Where source and
    destination lie on different file systems, what is moved is copied beside its destination
    first, so that the last step is a rename all the same.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.lstat().st_dev != destination.parent.stat().st_dev:
        near = destination.with_name(f".{destination.name}.new")
        try:
            if source.is_dir():
                shutil.rmtree(near, ignore_errors=True)
                shutil.copytree(source, near, symlinks=True)
            else:
                shutil.copyfile(source, near)
        except BaseException:
            shutil.rmtree(near, ignore_errors=True)
            near.unlink(missing_ok=True)
            raise
        source = near
    if destination.is_dir() and not destination.is_symlink():
        old = destination.with_name(f".{destination.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        destination.rename(old)
        source.rename(destination)
        shutil.rmtree(old)
    else:
        source.replace(destination)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file, atomically, indented, keys in the order given."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
