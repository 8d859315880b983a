"""Hidden states of a verifier on disk: one folder of large shards, read memory-mapped.

A folder holds `meta.json` (what the states are), `index.jsonl` (one line a shard: file, checksum
and its documents) and `shard-00000.safetensors` and so on. Rows are unshifted: row t belongs to
token t; `eagle3.shard_writer` writes them, `eagle3.codec` says in how many bits. Knows nothing of
what made the states, nor of how training pairs rows with targets.

Shape suffixes: N rows of a shard, T rows of a document, n aux layers, H hidden size, D documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from eagle3.codec import SCALE, STATES, STORED, Codec, decode
from eagle3.errors import HarnessError
from eagle3.reading import read_object
from eagle3.settings import Settings, read_settings
from eagle3.shardfile import read_tensors
from eagle3.workspace import digest_file


class StatesMeta(Settings):
    """What a folder of states holds. The last three counts are filled in when it is finished.

    `aux_layers` are post-layer indices: k is the output of decoder layer k, its residual added
    (transformers' `hidden_states[k + 1]`). `final_hidden` says whether `final` went through the
    verifier's last norm: the wrong belief trains against wrong targets without any error. Readers
    get states of `dtype`; `codec` is how they lie on disk.
    """

    schema_version: Literal[1] = 1
    verifier: str
    config_hash: str
    revision: str | None = None
    engine: str
    engine_version: str
    aux_layers: list[int] = Field(min_length=1)
    final_hidden: Literal["pre_norm", "post_norm"]
    dtype: Literal["bfloat16", "float16", "float32"]
    codec: Codec = "none"
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    rows: int = 0
    documents: int = 0
    supervised: int = 0


@dataclass(frozen=True, kw_only=True)
class Document:
    """One sample. Read from a dataset, its tensors are views of the memory-mapped shard; states in
    another codec than none are decoded when they are first asked for.

    Attributes:
        token_ids: i32[T].
        loss_mask: u8[T], 1 where the token is supervised.
        aux: [T, n, H], in the order of `StatesMeta.aux_layers`, dtype `StatesMeta.dtype`.
        final: [T, H], dtype `StatesMeta.dtype`.
        verifier_top1: i32[T], argmax over the full vocabulary of the verifier's logits at row t.
        verifier_lse: f32[T], log-sum-exp over the full vocabulary of the same logits.
    """

    id: str
    source: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    verifier_top1: torch.Tensor
    verifier_lse: torch.Tensor


class VerifierIdentity(Protocol):
    """The part of a verifier head's config that states are checked against."""

    @property
    def verifier(self) -> str: ...
    @property
    def config_hash(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...


ROWS = STORED["none"]
assert set(ROWS) == {field.name for field in fields(Document)} - {"id", "source"}


class _EncodedDocument(Document):
    """Holds the tensors of the shard until states are asked for: much reads token ids alone."""

    @classmethod
    def of(cls, rows: dict[str, Any], dtype: torch.dtype) -> Document:
        document = object.__new__(cls)
        encoded = {name: (rows.pop(name), rows.pop(SCALE.format(name)), dtype) for name in STATES}
        document.__dict__.update(rows, _encoded=encoded)
        return document

    @cached_property
    def aux(self) -> torch.Tensor:
        return decode(*self.__dict__["_encoded"]["aux"])

    @cached_property
    def final(self) -> torch.Tensor:
        return decode(*self.__dict__["_encoded"]["final"])


def _documents(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """A shard's documents as the index lists them.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: something else is listed.
    """
    for key, kind in (("file", str), ("bytes", int), ("sha256", str)):
        if not isinstance(shard[key], kind):
            raise ValueError(f"{key} is {shard[key]!r}")
    documents: list[dict[str, Any]] = shard["documents"]
    for item in documents:
        if type(item["length"]) is not int or item["length"] < 1:
            raise ValueError(f"length of sample {item['id']} is {item['length']!r}")
        if not isinstance(item["id"], str) or not isinstance(item["source"], str):
            raise ValueError(f"id or source of a sample: {item!r:.80}")
    return documents


def layout(meta: StatesMeta, rows: int, codec: Codec) -> dict[str, tuple[Any, ...]]:
    """Dtype (by name) and sizes of every tensor of so many rows in a codec."""
    states = {"none": meta.dtype, "fp8": "float8_e4m3fn"}[codec]
    layers, hidden = len(meta.aux_layers), meta.hidden_size
    known: dict[str, tuple[Any, ...]] = {
        "token_ids": ("int32", rows),
        "loss_mask": ("uint8", rows),
        "aux": (states, rows, layers, hidden),
        "final": (states, rows, hidden),
        "aux_scale": ("float32", rows, layers),
        "final_scale": ("float32", rows),
        "verifier_top1": ("int32", rows),
        "verifier_lse": ("float32", rows),
    }
    return {name: known[name] for name in known if name in STORED[codec]}


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's own, as `layout` says it."""
    return str(tensor.dtype).removeprefix("torch."), *tensor.shape


class StatesDataset(Sequence[Document]):
    """A finished folder of states. Documents are views of memory-mapped shards, never copies."""

    def __init__(self, folder: Path, meta: StatesMeta, shards: Iterable[dict[str, Any]]) -> None:
        self.folder = folder
        self.meta = meta
        self._shards = list(shards)
        self._place: list[tuple[int, int, int]] = []  # shard, first row, row after the last
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.lengths: list[int] = []
        for number, shard in enumerate(self._shards):
            start = 0
            for item in shard["documents"]:
                self._place.append((number, start, start + item["length"]))
                start += item["length"]
                self.ids.append(item["id"])
                self.sources.append(item["source"])
                self.lengths.append(item["length"])
        self._open: dict[int, dict[str, torch.Tensor]] = {}

    @classmethod
    def open(cls, folder: Path, verify: bool = False) -> StatesDataset:
        """Opens a finished folder.

        Args:
            verify: also read every shard and compare its checksum.

        Raises:
            HarnessError: the folder is unfinished, a shard is missing, of another size, or (with
                `verify`) of another content than when it was written.
        """
        path = folder / "meta.json"
        if not path.exists():
            raise HarnessError(
                "no finished folder of hidden states", where=folder, rule="meta.json is there",
                fix="run the extract stage (to the end)",
            )  # fmt: skip
        meta = read_settings(StatesMeta, read_object(path, fix="extract again"), where=str(path))
        index = folder / "index.jsonl"
        try:
            shards = [json.loads(line) for line in index.read_text().splitlines()]
            listed = sum(len(_documents(shard)) for shard in shards)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HarnessError(
                "the index of a folder of hidden states cannot be used", where=index,
                rule="one line of JSON a shard", got=f"{type(error).__name__}: {error}",
                fix="extract again",
            ) from None  # fmt: skip
        if listed != meta.documents:
            raise HarnessError(
                "index and meta disagree", where=index, rule=f"{meta.documents} documents",
                got=listed, fix="extract again",
            )  # fmt: skip
        for shard in shards:
            file = folder / shard["file"]
            size = file.stat().st_size if file.exists() else None
            if size != shard["bytes"]:
                raise HarnessError(
                    "a shard is missing or damaged", where=file, rule=f"{shard['bytes']} bytes",
                    got="no file" if size is None else f"{size} bytes", fix="extract again",
                )  # fmt: skip
            if verify and (found := digest_file(file)) != shard["sha256"]:
                raise HarnessError(
                    "a shard's content has changed since it was written", where=file,
                    rule=f"sha256 {shard['sha256']}", got=found, fix="extract again",
                )  # fmt: skip
        return cls(folder, meta, shards)

    def check(self, verifier: VerifierIdentity) -> None:
        """Raises:
        HarnessError: the states were made by another verifier than this one.
        """
        for name in ("config_hash", "hidden_size", "vocab_size"):
            ours, theirs = getattr(self.meta, name), getattr(verifier, name)
            if ours != theirs:
                raise HarnessError(
                    "hidden states and verifier do not belong together",
                    where=f"{self.folder} ({self.meta.verifier}) and {verifier.verifier}",
                    rule=f"{name} is {theirs}", got=ours,
                    fix="extract states with this verifier",
                )  # fmt: skip
        if max(self.meta.aux_layers) >= verifier.num_hidden_layers:
            raise HarnessError(
                "states of a layer that the verifier does not have", where=self.folder,
                rule=f"below {verifier.num_hidden_layers}", got=self.meta.aux_layers,
                fix="extract states with this verifier",
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        number, start, end = self._place[index]
        if number not in self._open:
            self._open[number] = self._read(self._shards[number])
        tensors = self._open[number]
        rows: dict[str, Any] = {name: tensors[name][start:end] for name in STORED[self.meta.codec]}
        rows |= {"id": self.ids[index], "source": self.sources[index]}
        if self.meta.codec == "none":
            return Document(**rows)
        return _EncodedDocument.of(rows, getattr(torch, self.meta.dtype))

    def _read(self, shard: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A shard's tensors, memory-mapped; others than meta and index say are refused."""
        file = self.folder / shard["file"]
        tensors = read_tensors(file)
        rows = sum(item["length"] for item in shard["documents"])
        for name, wanted in layout(self.meta, rows, self.meta.codec).items():
            one = tensors.get(name)
            found = None if one is None else layout_of(one)
            if found != wanted:
                raise HarnessError(
                    "a shard is stored in another way than its folder's meta.json says",
                    where=f"{file}, {name}",
                    rule=f"codec {self.meta.codec}, {self.meta.dtype}: {wanted[0]} "
                    f"{list(wanted[1:])}",
                    got="no such tensor" if found is None else f"{found[0]} {list(found[1:])}",
                    fix="restore meta.json and index.jsonl, or extract again",
                )  # fmt: skip
        return tensors

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # A loader process maps the shards itself; pickled tensors would travel as copies.
        return {**self.__dict__, "_open": {}}
