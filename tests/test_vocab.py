"""The draft vocabulary, against answers found by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eagle3.errors import HarnessError
from eagle3.responses import Response
from eagle3.vocab import (
    DraftVocabulary,
    build_vocabulary,
    count_supervised,
    read_vocabulary,
    write_vocabulary,
)


def response(token_ids: list[int], loss_mask: list[tuple[int, int]]) -> Response:
    return Response(id="a", source="s", token_ids=token_ids, loss_mask=loss_mask)


def test_counts_supervised_tokens_only() -> None:
    counts = count_supervised(
        [response([1, 2, 2, 5, 5], [(1, 3), (4, 5)]), response([5, 0], [(0, 1)])], 7
    )
    assert counts.tolist() == [0, 0, 2, 0, 0, 2, 0]


def test_special_first_then_by_rank_then_by_id() -> None:
    #                       0  1  2  3  4  5  6  7
    counts = torch.tensor([0, 0, 3, 9, 0, 3, 1, 3])
    # 4 is special; 3 has the highest count; 2, 5 and 7 tie and 2 comes first.
    three = build_vocabulary(counts, 3, [4])
    assert three.target_ids.tolist() == [2, 3, 4]
    assert three.d2t.tolist() == [2, 2, 2]
    assert three.t2d.nonzero()[:, 0].tolist() == [2, 3, 4]
    assert three.draft_of.tolist() == [-1, -1, 0, 1, 2, -1, -1, -1]
    assert three.coverage(counts) == 12 / 19
    # All that was seen is in: unseen tokens fill up in the order of their ids.
    seven = build_vocabulary(counts, 7, [4])
    assert seven.target_ids.tolist() == [0, 2, 3, 4, 5, 6, 7][:7]
    assert seven.d2t.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert seven.coverage(counts) == 1.0
    whole = build_vocabulary(counts, 8, [4])
    assert whole.d2t.tolist() == [0] * 8 and whole.t2d.all()


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.safetensors"
    write_vocabulary(DraftVocabulary.from_targets(torch.tensor([1]), 3), path, metadata={})
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(HarnessError, match=rf"{path}[\s\S]*20 bytes[\s\S]*run the vocab stage"):
        read_vocabulary(path, vocab_size=3)


def test_bad_sizes() -> None:
    counts = torch.tensor([1, 2, 3])
    with pytest.raises(HarnessError, match=r"larger than the verifier's[\s\S]*at most 3"):
        build_vocabulary(counts, 4, [])
    with pytest.raises(HarnessError, match=r"too small for the special[\s\S]*at least 2"):
        build_vocabulary(counts, 1, [0, 2])
    with pytest.raises(HarnessError, match="no supervised token"):
        build_vocabulary(torch.zeros(3, dtype=torch.int64), 2, [])


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "vocab.safetensors"
    made = DraftVocabulary.from_targets(torch.tensor([6, 1, 2]), 9)
    write_vocabulary(made, path, metadata={"coverage": {"train": 0.5}, "verifier": "tiny"})
    found = read_vocabulary(path, vocab_size=9)
    assert found.target_ids.tolist() == [1, 2, 6] and found.d2t.dtype == torch.int64
    assert torch.equal(found.t2d, made.t2d) and found.t2d.dtype == torch.bool
    with safe_open(path, framework="pt") as file:
        told = {name: json.loads(value) for name, value in file.metadata().items()}
    assert told == {"coverage": {"train": 0.5}, "verifier": "tiny"}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    bits = path.read_bytes()
    names = {f"name {n}": n for n in range(20)}
    write_vocabulary(made, path, metadata=names)
    many = path.read_bytes()
    for _ in range(3):  # of twenty names, chance does not write the same order each time
        write_vocabulary(made, path, metadata=names)
        assert path.read_bytes() == many
    write_vocabulary(made, path, metadata={"coverage": {"train": 0.5}, "verifier": "tiny"})
    assert path.read_bytes() == bits
    with pytest.raises(HarnessError, match="of another verifier"):
        read_vocabulary(path, vocab_size=10)
    write_vocabulary(DraftVocabulary(made.d2t + 1, made.t2d), path, metadata={})
    with pytest.raises(HarnessError, match="d2t and t2d disagree"):
        read_vocabulary(path, vocab_size=9)
    with pytest.raises(HarnessError, match="missing"):
        read_vocabulary(tmp_path / "none.safetensors", vocab_size=9)
