"""Safetensors files of many pieces: written without joining them in memory, read by mapping.

Knows bytes, names and dtypes; not what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eagle3.reading import open_tensors
from eagle3.workspace import flush_to_disk

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    parts: Mapping[str, Sequence[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """Writes tensors, each given as pieces to be joined along their first axis.

    The file appears under its name only when all of it is on disk.

    Args:
        parts: in the order in which they are to lie in the file; at least one piece each, pieces of
            one tensor alike in dtype and in all axes but the first. Readers want a tensor to start
            at a multiple of its item size: wider dtypes first, or sizes that keep to it.
        metadata: texts by name, for the file's header.

    Returns:
        The file's SHA-256 (hex) and its size in bytes.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, pieces in parts.items():
        size = sum(piece.nbytes for piece in pieces)
        header[name] = {
            "dtype": _NAMES[pieces[0].dtype],
            "shape": [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]],
            "data_offsets": [start, start + size],
        }
        start += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format aligns its data to 8 bytes
    checksum = hashlib.sha256()
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("wb") as file:
        for chunk in (len(head).to_bytes(8, "little"), head):
            file.write(chunk)
            checksum.update(chunk)
        for pieces in parts.values():
            for piece in pieces:
                data = piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(data)
                checksum.update(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush_to_disk(path.parent)
    return checksum.hexdigest(), 8 + len(head) + start


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, memory-mapped: pages are read when they are first touched.

    Raises:
        HarnessError: the file is damaged.
    """
    with open_tensors(path, fix="extract again") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
