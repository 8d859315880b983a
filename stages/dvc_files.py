"""What DVC left on disk, read without DVC: dvc.lock, its cache, the runs that it remembers.

Digests are DVC's: MD5 of a file, or of a folder's list of files with `.dir` after it. Knows nothing
of what the pipeline computes.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from stages.params import read_yaml

FOLDER = ".dir"


@dataclass(frozen=True)
class Entry:
    """A stage as it ran once: digests by path. `params` holds the keys that it depends on."""

    name: str
    cmd: str
    deps: Mapping[str, str]
    outs: Mapping[str, str]
    params: Mapping[str, Any]
    current: bool  # in dvc.lock; else only in the run cache

    @staticmethod
    def of(name: str | None, value: Mapping[str, Any], *, current: bool) -> Entry:
        """From a mapping as dvc.lock has it."""
        return Entry(
            name or _stage_of(value["cmd"]),
            value["cmd"],
            {item["path"]: item["md5"] for item in value.get("deps", []) if "md5" in item},
            {item["path"]: item["md5"] for item in value.get("outs", []) if "md5" in item},
            {
                key: setting
                for values in value.get("params", {}).values()
                for key, setting in values.items()
            },
            current,
        )


def _stage_of(cmd: str) -> str:
    words = cmd.split()
    if "--name" in words:
        return words[words.index("--name") + 1]
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else words[0]


def read_lock(root: Path) -> dict[str, Entry]:
    """The stages of dvc.lock by name, in its order; empty where there is none.

    Raises:
        HarnessError: it is not what DVC writes.
    """
    path = root / "dvc.lock"
    if not path.is_file():
        return {}
    found = read_yaml(path).get("stages") or {}
    name = "stages"
    try:
        entries = {}
        for name, value in found.items():
            entries[name] = Entry.of(name, value, current=True)
        return entries
    except (AttributeError, KeyError, TypeError) as error:
        raise HarnessError(
            "DVC's record of what has run is damaged",
            where=f"{path}, {name}",
            rule="a whole file, as DVC wrote it",
            got=f"{type(error).__name__}: {error}",
            fix="`git checkout dvc.lock`; or delete it, and `make repro` writes it anew out of the "
            "run cache",
        ) from None


class Cache:
    """The project's DVC cache; what is not there is None."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".dvc" / "cache"
        for name in ("config", "config.local"):
            settings = configparser.ConfigParser(interpolation=None)
            path = root / ".dvc" / name
            try:
                settings.read(path)
            except configparser.Error as error:
                raise HarnessError(
                    "DVC's settings cannot be read",
                    where=path,
                    rule="key = value below [sections]",
                    got=str(error).splitlines()[0],
                    fix=f"`git checkout .dvc/{name}`, or correct it",
                ) from None
            if place := settings.get("cache", "dir", fallback=None):
                self.folder = (root / ".dvc" / place).resolve()

    def object(self, md5: str) -> Path | None:
        """The file with this digest (for a folder: its list)."""
        path = self.folder / "files" / "md5" / md5[:2] / md5[2:]
        return path if path.is_file() else None

    def listing(self, md5: str) -> dict[str, str] | None:
        """Digests of a folder's files by path within it."""
        path = self.object(md5)
        if path is None:
            return None
        return {item["relpath"]: item["md5"] for item in json.loads(path.read_text())}

    @cached_property
    def runs(self) -> list[Entry]:
        """Every run of a stage that DVC could give back without running it again.

        A record that is damaged is none: DVC does without it too.
        """
        found = []
        for path in sorted((self.folder / "runs").glob("*/*/*")):
            with contextlib.suppress(HarnessError, AttributeError, KeyError, TypeError):
                if path.is_file():
                    found.append(Entry.of(None, read_yaml(path), current=False))
        return found


def digest_of_listing(listing: Mapping[str, str]) -> str:
    """A folder's digest from those of its files, as DVC makes it."""
    items = [{"md5": listing[name], "relpath": name} for name in sorted(listing)]
    return hashlib.md5(json.dumps(items, sort_keys=True).encode()).hexdigest() + FOLDER


def file_digest(path: Path) -> str:
    """MD5 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def folder_listing(path: Path) -> dict[str, str]:
    """Digests of a folder's files on disk by path within it."""
    return {
        item.relative_to(path).as_posix(): file_digest(item)
        for item in sorted(path.rglob("*"))
        if item.is_file()
    }
