"""Reading of responses: token ids and the runs of them that are supervised.

Token ids are the truth: nothing here tokenises. Knows nothing of how responses were made.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.errors import HarnessError


class Response(BaseModel):
    """One line of a responses file, as far as readers need it.

    `loss_mask` holds half-open runs [start, end) of supervised tokens, ascending.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    id: str = Field(min_length=1)
    source: str
    token_ids: list[int] = Field(min_length=1)
    loss_mask: list[tuple[int, int]]

    def tokens(self) -> torch.Tensor:
        """i32[T]."""
        return torch.tensor(self.token_ids, dtype=torch.int32)

    def mask(self) -> torch.Tensor:
        """u8[T], 1 where supervised."""
        mask = torch.zeros(len(self.token_ids), dtype=torch.uint8)
        for start, end in self.loss_mask:
            mask[start:end] = 1
        return mask


def read_responses(path: Path, *, vocab_size: int, max_length: int | None = None) -> list[Response]:
    """Reads and checks a responses file.

    Args:
        vocab_size: of the verifier that wrote them.
        max_length: longest document allowed, in tokens: the verifier's context.

    Raises:
        HarnessError: names file and line of what is malformed, out of the vocabulary, too long or
            there twice; or the file is missing or empty.
    """
    if not path.is_file():
        raise HarnessError(
            "no responses file",
            where=path,
            rule="a .jsonl file",
            got="no such file",
            fix="run the regenerate stage",
        )
    responses: list[Response] = []
    lines: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                response = Response.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(str(part) for part in first["loc"])
                raise HarnessError(
                    "malformed response", where=where,
                    rule=f"{key}: {first['msg']}" if key else first["msg"],
                    fix="generate the responses again, or correct the line",
                ) from None  # fmt: skip
            _check(response, where, vocab_size, max_length)
            if response.id in lines:
                raise HarnessError(
                    "the same response twice", where=where, got=response.id,
                    rule=f"an id stands once; line {lines[response.id]} has it already",
                    fix="take one of the two lines out, or generate the responses again",
                )  # fmt: skip
            lines[response.id] = number
            responses.append(response)
    if not responses:
        raise HarnessError(
            "the responses file is empty",
            where=path,
            rule="one JSON object a line",
            got="no line",
            fix="regenerate",
        )
    return responses


def _check(response: Response, where: str, vocab_size: int, max_length: int | None) -> None:
    length = len(response.token_ids)
    low, high = min(response.token_ids), max(response.token_ids)
    if low < 0 or high >= vocab_size:
        raise HarnessError(
            "token id outside the verifier's vocabulary", where=where,
            rule=f"0 to {vocab_size - 1}", got=low if low < 0 else high,
            fix="use responses that this verifier wrote",
        )  # fmt: skip
    if max_length is not None and length > max_length:
        raise HarnessError(
            "document longer than the verifier's context", where=f"{where} (sample {response.id})",
            rule=f"at most {max_length} tokens", got=length,
            fix="lower the tokens asked of a response, or drop the sample",
        )  # fmt: skip
    last = 0
    for start, end in response.loss_mask:
        if not last <= start < end <= length:
            raise HarnessError(
                "loss mask does not fit the tokens", where=where, got=response.loss_mask,
                rule=f"ascending runs [start, end) within {length} tokens",
                fix="generate the responses again, or correct the line",
            )  # fmt: skip
        last = end


def read_splits(
    folder: Path, *, vocab_size: int, max_length: int | None = None
) -> dict[str, list[Response]]:
    """Every `<split>.jsonl` in a folder by split, in the order of names.

    Raises:
        HarnessError: as `read_responses`, or there is no such file.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise HarnessError(
            "no responses", where=folder, rule="files <split>.jsonl", fix="run the regenerate stage"
        )
    return {
        path.stem: read_responses(path, vocab_size=vocab_size, max_length=max_length)
        for path in paths
    }
