"""The draft vocabulary: which of the verifier's tokens a drafter can propose.

Knows token counts, not text. A draft token's id and the verifier's id for it are joined by an
offset, as serving engines read it: target id = draft id + d2t[draft id].

Shape suffixes: V verifier's vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from pydantic import Field

from eagle3.draft_map import read_map
from eagle3.errors import HarnessError
from eagle3.reading import open_tensors
from eagle3.responses import Response
from eagle3.settings import Settings
from eagle3.shardfile import write_tensors


class VocabSettings(Settings):
    """Size of the draft vocabulary; None takes the verifier's whole vocabulary."""

    size: int | None = Field(default=8192, gt=0)


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft vocabulary.

    Attributes:
        d2t: i64[D], offsets: draft token i is the verifier's token i + d2t[i]. Ascending targets.
        t2d: bool[V], whether the verifier's token is in the draft vocabulary.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __len__(self) -> int:
        return len(self.d2t)

    @cached_property
    def target_ids(self) -> torch.Tensor:
        """i64[D], the verifier's id of each draft token."""
        return torch.arange(len(self.d2t)) + self.d2t

    @cached_property
    def draft_of(self) -> torch.Tensor:
        """i64[V], the draft id of each of the verifier's tokens, -1 where there is none."""
        draft = torch.full((len(self.t2d),), -1, dtype=torch.int64)
        draft[self.target_ids] = torch.arange(len(self.d2t))
        return draft

    def coverage(self, counts_V: torch.Tensor) -> float:
        """Share of counted tokens that can be drafted; 0.0 where nothing is counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.t2d].sum()) / total if total else 0.0

    @classmethod
    def from_targets(cls, target_ids: torch.Tensor, vocab_size: int) -> DraftVocabulary:
        """From the verifier's ids, in any order, none twice."""
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[target_ids] = True
        ascending = t2d.nonzero()[:, 0]
        return cls(d2t=ascending - torch.arange(len(ascending)), t2d=t2d)


def count_supervised(responses: Iterable[Response], vocab_size: int) -> torch.Tensor:
    """i64[V]: how often each token is supervised."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for response in responses:
        ids = response.tokens()[response.mask().bool()]
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def build_vocabulary(
    counts_V: torch.Tensor, size: int, special_ids: Iterable[int]
) -> DraftVocabulary:
    """The special tokens, then the most frequent ones; equal counts go by token id.

    Args:
        counts_V: i64[V], from training data only.
        size: of the draft vocabulary. Where fewer tokens have been seen, unseen ones fill it up, so
            that its size doesn't depend on the data.
        special_ids: always in: a drafter that can't end an answer loses every last step.

    Raises:
        HarnessError: larger than the verifier's vocabulary, too small for the special tokens, or
            nothing was counted.
    """
    vocab_size = len(counts_V)
    special = sorted({index for index in special_ids if 0 <= index < vocab_size})
    if size > vocab_size:
        raise HarnessError(
            "draft vocabulary larger than the verifier's", where="vocab.size",
            rule=f"at most {vocab_size}", got=size, fix="a smaller size, or null for all tokens",
        )  # fmt: skip
    if size < len(special):
        raise HarnessError(
            "draft vocabulary too small for the special tokens", where="vocab.size",
            rule=f"at least {len(special)}", got=size, fix="a larger size, or null for all tokens",
        )  # fmt: skip
    if not counts_V.any():
        raise HarnessError(
            "no supervised token to choose a draft vocabulary by",
            where="loss masks of the training data", rule="one supervised token or more", got=0,
            fix="training data with answers in it: loss masks that are not all 0",
        )  # fmt: skip
    rank = counts_V.clone()
    rank[special] = counts_V.max() + 1
    chosen = torch.argsort(rank, descending=True, stable=True)[:size]
    return DraftVocabulary.from_targets(chosen, vocab_size)


def write_vocabulary(
    vocabulary: DraftVocabulary, path: Path, *, metadata: Mapping[str, object]
) -> None:
    """Writes d2t and t2d with metadata (each value as JSON); the file appears when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors' own writer puts the names of metadata in a random order.
    write_tensors(
        path,
        {"d2t": [vocabulary.d2t], "t2d": [vocabulary.t2d]},
        {name: json.dumps(value) for name, value in metadata.items()},
    )


def read_vocabulary(path: Path, *, vocab_size: int) -> DraftVocabulary:
    """Reads a vocabulary file.

    Args:
        vocab_size: of the verifier it is going to be used with.

    Raises:
        HarnessError: missing, not a vocabulary file, d2t and t2d disagree, or another verifier's.
    """
    if not path.is_file():
        raise HarnessError(
            "the draft vocabulary is missing",
            where=path,
            rule="a file with d2t and t2d",
            fix="run the vocab stage",
        )
    with open_tensors(path, fix="run the vocab stage again") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if set(tensors) != {"d2t", "t2d"}:
        raise HarnessError(
            "not a draft vocabulary", where=path, rule="tensors d2t, t2d", got=sorted(tensors),
            fix="give the file of the vocab stage, or a folder with d2t.npy and t2d.npy",
        )  # fmt: skip
    t2d = tensors["t2d"].bool()
    offsets, _ = read_map(tensors["d2t"], t2d, vocab_size, where=path)
    return ordered(DraftVocabulary(d2t=offsets, t2d=t2d), where=path)


def ordered(vocabulary: DraftVocabulary, *, where: object) -> DraftVocabulary:
    """The same vocabulary.

    Raises:
        HarnessError: its tokens do not ascend, as every reader of a mapping takes for granted.
    """
    falls = (vocabulary.target_ids.diff() <= 0).nonzero()[:, 0].tolist()
    if falls:
        at = falls[0]
        raise HarnessError(
            "the tokens of a draft vocabulary do not ascend", where=where,
            rule="draft ids in the order of token ids",
            got=f"token {int(vocabulary.target_ids[at])} before "
            f"{int(vocabulary.target_ids[at + 1])}, at draft id {at}",
            fix="sort the tokens; with --finetune-from, head rows follow by token id",
        )  # fmt: skip
    return vocabulary
