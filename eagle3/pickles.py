"""Tensors out of files that `torch.save` wrote, without running anything that is in them.

Only tensors and plain containers are let through, and tensor data is mapped, not read; but of a
file in gzip (`.gz`), which cannot be mapped: it is unpacked into memory whole.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import HarnessError


def load_pickled(path: Path) -> dict[str, Any]:
    """A dictionary of tensors and plain values.

    Raises:
        HarnessError: missing, damaged, holds anything else than tensors and plain containers (such
            a file could run code when opened), or no dictionary.
    """
    try:
        value = _load(path)
    except pickle.UnpicklingError as error:
        raise HarnessError(
            "a file holds more than tensors, and opening it could run code",
            where=path,
            rule="tensors, numbers and texts in lists and dictionaries (torch.load, weights_only)",
            got=_named(error),
            fix="save its tensors alone, with a program that you trust to open it",
        ) from None
    except Exception as error:  # bytes that are no pickle end in whatever they are taken for
        size = f", {path.stat().st_size} bytes" if path.is_file() else ""
        said = str(error).strip().split("\n")[0][:200]
        raise HarnessError(
            "a file of tensors cannot be opened",
            where=path,
            rule="a whole file as torch.save writes it"
            + (", in gzip" if path.suffix == ".gz" else ""),
            got=f"{type(error).__name__}: {said}{size}" if said else type(error).__name__ + size,
            fix="write or copy it again, or remove it",
        ) from None
    if not isinstance(value, dict):
        raise HarnessError(
            "a file of tensors does not hold what belongs there",
            where=path, rule="a dictionary by name", got=type(value).__name__,
            fix="save its state_dict",
        )  # fmt: skip
    return value


def _named(error: pickle.UnpicklingError) -> str:
    """What it holds beyond tensors, out of torch's page of advice."""
    text = str(error).strip()
    found = re.search(r"GLOBAL ([\w.]+)|Unsupported (?:class|operand) [\w.]+", text)
    return (found[1] or found[0]) if found else text.split("\n")[0][:200]


class PickledTensors:
    """The tensors of such a file by name, as `safe_open` gives those of its own.

    Raises:
        HarnessError: as `load_pickled`.
    """

    def __init__(self, path: Path) -> None:
        found = load_pickled(path)
        self._tensors = {name: t for name, t in found.items() if isinstance(t, torch.Tensor)}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _load(path: Path) -> Any:
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            # Whole, at once: torch jumps about in it, and each jump back would unpack it anew.
            unpacked = io.BytesIO(file.read())
        return torch.load(unpacked, map_location="cpu", weights_only=True)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # The format of before torch 1.6, which cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True)
