"""Writes a folder of hidden states, shard by shard, so that a killed writer can go on.

What a folder holds is said in `eagle3.dataset`, which reads it. Knows nothing of what makes the
states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.codec import STORED, stored
from eagle3.dataset import ROWS, Document, StatesMeta, layout, layout_of
from eagle3.errors import HarnessError
from eagle3.shardfile import write_tensors
from eagle3.workspace import write_json

_DRAFT = "writing.json"  # what an unfinished folder is going to be
_Pending = tuple[str, str, dict[str, torch.Tensor]]  # id, source, rows as they are stored


class ShardWriter:
    """Writes documents into shards. Killed at any moment, a new writer goes on where it was.

    A shard is written under another name, flushed to disk and renamed, and only then listed in
    `index.jsonl`: what the index lists is complete. With the same documents added in the same order
    (those in `done` left out), the folder ends up with the same bytes as without an interruption.
    `meta.json` appears last.

    Args:
        folder: made if missing; leftovers of a killed writer in it are taken up or deleted.
        meta: counts left at 0.
        shard_bytes: a shard is closed when its documents reach this size. Its documents are held in
            memory until then.

    Raises:
        HarnessError: the folder holds states of another meta.
    """

    def __init__(self, folder: Path, meta: StatesMeta, shard_bytes: int = 2 << 30) -> None:
        self._folder = folder
        self._meta = meta
        self._shard_bytes = shard_bytes
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        wanted = meta.model_dump(mode="json")
        draft = folder / _DRAFT
        if draft.exists():
            found = json.loads(draft.read_text())
            if found != wanted:
                differing = sorted(key for key in wanted if found.get(key) != wanted[key])
                raise HarnessError(
                    "an unfinished folder holds states of another kind",
                    where=folder,
                    rule="states of one folder have one origin",
                    got=f"differs in {', '.join(differing)}",
                    fix="delete the folder",
                )
        else:
            write_json(draft, wanted)
        self._shards = self._recover()

    @property
    def done(self) -> set[str]:
        """Ids of documents in finished shards."""
        return {item["id"] for shard in self._shards for item in shard["documents"]}

    def add(self, document: Document) -> None:
        """Takes a document; writes a shard when enough have come together.

        Raises:
            HarnessError: names the sample whose tensors disagree in length, shape or dtype with the
                meta, or hold a NaN or infinity.
        """
        _check(document, self._meta)
        rows = stored({name: getattr(document, name) for name in ROWS}, self._meta.codec)
        self._pending.append((document.id, document.source, rows))
        self._pending_bytes += sum(tensor.nbytes for tensor in rows.values())
        if self._pending_bytes >= self._shard_bytes:
            self._flush()

    def finish(self) -> StatesMeta:
        """Writes what is left and `meta.json`: the folder is complete. Returns the filled meta."""
        self._flush()
        if not self._shards:
            raise HarnessError(
                "no document to write",
                where=self._folder,
                rule="one document or more",
                got="none",
                fix="responses, or samples, for this split",
            )
        meta = self._meta.model_copy(
            update={
                "rows": sum(shard["rows"] for shard in self._shards),
                "documents": sum(len(shard["documents"]) for shard in self._shards),
                "supervised": sum(shard["supervised"] for shard in self._shards),
            }
        )
        write_json(self._folder / "meta.json", meta.model_dump(mode="json"))
        (self._folder / _DRAFT).unlink(missing_ok=True)
        return meta

    def _recover(self) -> list[dict[str, Any]]:
        """Shards that are safely on disk. What else lies about goes, torn index lines too."""
        index = self._folder / "index.jsonl"
        kept: list[dict[str, Any]] = []
        for line in index.read_bytes().splitlines(keepends=True) if index.exists() else []:
            if not line.endswith(b"\n"):
                break
            shard = json.loads(line)
            file = self._folder / shard["file"]
            if not file.exists() or file.stat().st_size != shard["bytes"]:
                break
            kept.append(shard)
        with index.open("wb") as file:
            file.writelines(_line(shard) for shard in kept)
            os.fsync(file.fileno())
        known = {shard["file"] for shard in kept}
        for path in self._folder.glob("shard-*"):
            if path.name not in known:
                path.unlink()
        return kept

    def _flush(self) -> None:
        documents, self._pending, self._pending_bytes = self._pending, [], 0
        if not documents:
            return
        lengths = [len(rows["token_ids"]) for _, _, rows in documents]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        name = f"shard-{len(self._shards):05d}.safetensors"
        parts: dict[str, Sequence[torch.Tensor]] = {"document": [offsets]}
        parts |= {
            name: [rows[name] for _, _, rows in documents] for name in STORED[self._meta.codec]
        }
        sha256, size = write_tensors(self._folder / name, parts)
        shard = {
            "file": name,
            "sha256": sha256,
            "bytes": size,
            "rows": sum(lengths),
            "supervised": sum(int(rows["loss_mask"].sum()) for _, _, rows in documents),
            "documents": [
                {"id": name, "source": source, "length": length}
                for (name, source, _), length in zip(documents, lengths, strict=True)
            ],
        }
        with (self._folder / "index.jsonl").open("ab") as file:
            file.write(_line(shard))
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(shard)


def _line(shard: dict[str, Any]) -> bytes:
    return json.dumps(shard).encode() + b"\n"


def _check(document: Document, meta: StatesMeta) -> None:
    """Refuses tensors that are not what the meta says before any codec, or no numbers."""
    for name, wanted in layout(meta, len(document.token_ids), "none").items():
        tensor: torch.Tensor = getattr(document, name)
        found = layout_of(tensor)
        if found != wanted:
            raise HarnessError(
                f"{name} does not fit the sample's tokens", where=f"sample {document.id}",
                rule=f"{wanted[0]} {list(wanted[1:])}", got=f"{found[0]} {list(found[1:])}",
                fix="the engine dropped or added rows: a prefix cache or chunked prefill",
            )  # fmt: skip
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise HarnessError(
                f"{name} holds a NaN or infinity", where=f"sample {document.id}",
                rule="finite numbers",
                fix="extract in a wider dtype, or leave the sample out",
            )  # fmt: skip
