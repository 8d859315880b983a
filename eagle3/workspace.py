"""Work that outlives a crash: a folder to work in, and publishing in one step.

Pipelines delete a stage's outputs before they run it again, so nothing that a rerun could resume
may lie there. A stage works in `.work/<stage>-<hash of all it depends on>/` and moves what is
finished into place at the end. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError

UNFINISHED = ".unfinished"  # how the name of a file ends that is being written
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and a flag of renameat2(2)


def digest(value: object) -> str:
    """SHA-256 of a JSON value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def work_folder(
    root: Path,
    stage: str,
    key: Mapping[str, Any],
    *,
    leads: bool = True,
    output: Path | None = None,
) -> Iterator[Path]:
    """Opens `.work/<stage>-<hash of key>/` for one process; it is deleted when the block succeeds.

    What a crashed run left under the same key is still there when the next one opens it. Folders
    of the same stage under other keys are left alone: an interrupted run of other settings can
    still be taken up.

    Args:
        leads: false for a process that works in the folder of another, its leader: what is locked,
            made and deleted is the leader's alone.
        output: where the result goes, if two keys may have the same place for it: one process at a
            time works for it, whatever its key.

    Raises:
        HarnessError: another process works in the same folder, or for the same output, now.
    """
    folder = root / ".work" / f"{stage}-{digest(key)[:16]}"
    if not leads:
        yield folder
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    alone = folder if output is None else folder.with_name(f"{stage}-{digest(str(output))[:16]}")
    with locked(alone.with_name(f"{alone.name}.lock")) as lock:
        if lock is None:
            same = "with the same settings" if output is None else "into the same folder"
            raise HarnessError(
                f"{stage} {same} is running already",
                where=output or folder,
                rule="one process at a time",
                fix="wait for it or stop it; its work is kept",
            )
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        except BaseException:
            if not any(folder.iterdir()):  # nothing was begun: nothing to take up
                folder.rmdir()
                lock.unlink()
            raise
        shutil.rmtree(folder)
        lock.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Path | None]:
    """Holds a lock file, which the holder may delete; None where another process holds it."""
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            # Its last holder may have deleted it between our open and our lock: another process
            # may then hold a new file of this name, and ours locks nothing.
            if _stands_at(path, file.fileno()):
                yield path
                return


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Holds a lock file as soon as no other process does; made with its folder, and left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _stands_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def publish(source: Path, destination: Path) -> None:
    """Moves a finished file or folder into place, whole.

    What stood there is replaced in one step: a reader, or a kill, finds the old or the new. Where
    the file system cannot exchange two folders (NFS, systems other than Linux), a folder takes two
    renames; killed between them, what stood there lies beside as `.<name>.old` and nothing at the
    destination. Where source and destination lie on different file systems, what is moved is
    copied beside its destination first, so that the last step is a rename all the same. What a
    killed run left of files that it was just writing does not travel along.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        for leftover in source.rglob(f".*{UNFINISHED}"):
            leftover.unlink()
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
        if source.is_dir() and _exchange(source, destination):
            shutil.rmtree(source)
            return
        old = destination.with_name(f".{destination.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        destination.rename(old)
        source.rename(destination)
        shutil.rmtree(old)
    else:
        source.replace(destination)


def _exchange(one: Path, other: Path) -> bool:
    """Two names change places in one step of the file system; False where it cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return rename is not None and not rename(
        _HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE
    )


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
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


def flush_to_disk(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk: a rename lasts from then
    on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file, atomically, indented, keys in the order given."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
