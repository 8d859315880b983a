"""Decoded answers as text: where each token came from, and characters of several tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.decoded_texts import pieces, positions, write_texts


class Bytes:
    """A token a byte; a text's first space is dropped, as sentencepiece does."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        assert options["skip_special_tokens"] is False
        return bytes(token_ids).decode(errors="replace").removeprefix(" ")


def test_positions_by_hand() -> None:
    # Prompt's token; two drafts and a bonus; none accepted; three drafts, cut within the step.
    assert positions([2, 0, 3], 8) == [0, 1, 2, 0, 0, 1, 2, 3]
    assert positions([1], 3) == [0, 1, 0]
    assert positions([], 1) == [0]


@pytest.mark.parametrize("text", ["one two", "naïve “τ” 字  end", "a\n\n b"])
def test_pieces_are_the_text(text: str) -> None:
    found = pieces(Bytes(), list(text.encode()))
    assert len(found) == len(text.encode())
    assert "".join(found) == text
    # A character of several bytes belongs to its last one.
    assert [piece for piece in found if piece] == list(text)


def test_a_cut_within_a_character_is_kept() -> None:
    assert pieces(Bytes(), list("aτ".encode())[:2]) == ["a", "\ufffd"]


def test_real_tokenizer(tiny_verifier: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    ids = tokenizer("def f(x):\n    return x + 1  # τ → 字")["input_ids"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_lines(tmp_path: Path) -> None:
    text = {
        "id": "a",
        "benchmark": "x",
        "prompt": "τ?",
        "pieces": ["y", "es"],
        "positions": [0, 1],
    }
    write_texts(tmp_path / "a.texts.jsonl", [text, text])
    lines = (tmp_path / "a.texts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [text, text]
