"""Decoded answers as text, each token with where it came from: a draft's position or the verifier.

Knows token ids and a tokenizer, not how anything was decoded or where it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eagle3.workspace import write_atomically

UNFINISHED = "\ufffd"  # what a tokenizer makes of half a character


class Detokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


def positions(accepted_per_step: Sequence[int], tokens: int) -> list[int]:
    """Where each of an answer's tokens came from: 1 .. k for the draft at that position, 0 for the
    verifier's own, which are the prompt pass's first token and each step's last.

    Args:
        accepted_per_step: accepted drafts of each verification step.
        tokens: of the answer, which may end within its last step.
    """
    found = [0]
    for accepted in accepted_per_step:
        found += [*range(1, accepted + 1), 0]
    return found[:tokens]


def pieces(tokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; together they are the text of all.

    A token that ends within a character has no text: the one that ends the character has it.
    """
    ids = list(token_ids)

    def text(start: int, end: int) -> str:
        # Special tokens stay, since a decoded end is a token like another.
        return tokenizer.decode(
            ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    found: list[str] = []
    # Decoded from the piece before on: some tokenizers drop the space that a text begins with.
    before = done = 0
    for end in range(1, len(ids) + 1):
        known, now = text(before, done), text(before, end)
        if now.endswith(UNFINISHED) and end < len(ids):
            found.append("")
            continue
        found.append(now[len(known) :])
        before, done = done, end
    return found


def write_texts(path: Path, texts: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines with `id`, `benchmark`, `prompt`, `pieces` and `positions`."""
    lines = [json.dumps(dict(text), ensure_ascii=False) + "\n" for text in texts]
    write_atomically(path, "".join(lines))
