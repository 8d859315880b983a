"""Opening of input files, so that a broken one is named.

Knows JSON and safetensors, not what they are to hold.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle3.errors import HarnessError

HALF = b"\\ud"  # how JSON begins to write half of a character, and both halves of many


def read_object(path: Path, *, fix: str | None = None) -> dict[str, Any]:
    """A JSON file that holds one object.

    Raises:
        HarnessError: it is not JSON (with line and column), not UTF-8, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HarnessError(
            "not a JSON file", where=path, rule="one JSON object", got=error, fix=fix
        ) from None
    if not isinstance(value, dict):
        raise HarnessError(
            "not the JSON that belongs here",
            where=path,
            rule="one JSON object",
            got=type(value).__name__,
            fix=fix,
        )
    return value


def read_index(path: Path, *, fix: str) -> dict[str, str]:
    """Tensor name -> file name, from the index of sharded weights.

    Raises:
        HarnessError: not such an index.
    """
    names = read_object(path, fix=fix).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise HarnessError(
            "the index of a folder of weights cannot be used",
            where=path,
            rule="weight_map: tensor names to file names",
            got=repr(names)[:200],
            fix=fix,
        )
    return names


@contextlib.contextmanager
def open_tensors(path: Path, *, fix: str) -> Iterator[Any]:
    """A safetensors file as `safe_open` gives it, memory-mapped.

    Raises:
        HarnessError: a truncated or damaged file, or another format; with its size.
    """
    try:
        opened = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        size = f", {path.stat().st_size} bytes" if path.is_file() else ""
        raise HarnessError(
            "a file of weights cannot be opened",
            where=path,
            rule="a whole safetensors file",
            got=f"{error}{size}",
            fix=fix,
        ) from None
    with opened as file:
        yield file


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of every line of a JSONL file (gzip by its name); blank ones skipped.

    Raises:
        HarnessError: no such file, or a line that is not JSON, by number.
    """
    if not path.is_file():
        raise HarnessError(
            "a file of JSON lines is missing",
            where=path,
            rule="a .jsonl file",
            got="no such file",
            fix="correct the path, or run what makes it first",
        )
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _value(line, f"{path}:{number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise HarnessError(
            "a compressed file is broken",
            where=f"{path}, after line {number}",
            rule="gzip, whole",
            got=error,
            fix="download it again; without compression, name it .jsonl",
        ) from None


def _value(line: bytes, where: str) -> Any:
    try:
        value = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with its mark
        if HALF in line.lower():
            # JSON can name half a character in any of its texts; no file can hold it.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        shown = line.strip()[:80].decode(errors="replace")
        what: object = error
        if isinstance(error, RecursionError):
            what = "nested too deep"
        elif isinstance(error, UnicodeEncodeError):
            what = f"a text is not Unicode: {error}"
        raise HarnessError(
            "a line is not JSON",
            where=where,
            rule="one JSON object a line, in UTF-8",
            got=f"{shown!r} ({what})",
            fix="correct or remove the line",
        ) from None
