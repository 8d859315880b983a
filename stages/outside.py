"""What settings name from outside of the project: DVC knows it by its path, this by its content.

A stage keeps the digests in its provenance; `eagle3 repro` compares them with what lies there now.
Knows nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.workspace import digest, digest_file

# Where such paths stand, by section of params.yaml: the stage of the same name is the one that
# reads it. A name of the hub or of a data set may stand there too, which is no path.
KEYS: Mapping[str, tuple[str, ...]] = {"verifier": ("source",), "prompts": ("source", "test.path")}
WHOLE = 64 << 20  # bytes; a larger file of a folder is known by its size and its two ends
END = 1 << 20


def named(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and value of all that a section names from outside, whether it is there or not."""
    for key in KEYS.get(section, ()):
        first, _, inner = key.partition(".")
        if not inner:
            if isinstance(values.get(key), str):
                yield key, values[key]
            continue
        for number, item in enumerate(values.get(first) or []):
            if isinstance(item, Mapping) and isinstance(item.get(inner), str):
                yield f"{first}[{number}].{inner}", item[inner]


def digests(root: Path, section: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Digest of everything that a section names from outside and that is there, by its path.

    Args:
        root: folder from which paths count.
    """
    places = {value: root / value for _, value in named(section, values)}
    return {value: content_of(place) for value, place in places.items() if place.exists()}


def content_of(path: Path) -> str:
    """Digest of a file, or of the files right in a folder: their names and what is in them.

    A terabyte of weights is not read: of a large file in a folder its size and its ends count.
    """
    if path.is_file():
        return digest_file(path)
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name[0] != "."]
    return digest([[file.name, _part(file)] for file in files])


def _part(path: Path) -> list[object]:
    size = path.stat().st_size
    if size <= WHOLE:
        return [size, digest_file(path)]
    found = hashlib.sha256()
    with path.open("rb") as file:
        found.update(file.read(END))
        file.seek(size - END)
        found.update(file.read(END))
    return [size, found.hexdigest()]
