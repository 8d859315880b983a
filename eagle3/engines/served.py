"""What evaluation asks of a serving engine, whichever it is.

Knows no engine. The loop over prompts and the comparison with local decoding are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eagle3.engines.server import Server, ask
from eagle3.errors import HarnessError


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A greedy answer and what verification counted on it.

    Attributes:
        token_ids: the new tokens, cut after the first EOS (which is kept) and at the limit.
        seconds: from the request to the whole answer.
        verify_steps: verification steps; the prompt's own pass is none. 0 without a drafter.
        drafted, accepted: draft tokens, before any cut.
        accepted_per_position: steps that accepted the draft at position 1 .. k.
        accepted_per_step: accepted drafts of each step, where the engine tells them.
    """

    token_ids: list[int]
    seconds: float
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_per_step: list[int] | None = None


class Decoder(Protocol):
    """A server that answers greedily, one request after the other."""

    @property
    def version(self) -> str: ...

    def decode(self, prompt_ids: Sequence[int], max_tokens: int) -> Answer: ...


class ServingEngine(Protocol):
    """Serves a verifier, alone or with a drafter that proposes chains of k tokens."""

    @property
    def name(self) -> str: ...

    def check(self, drafter: Path) -> None:
        """Raises a HarnessError for what would fail, or go wrong silently, after a long start."""

    def serve(self, drafter: Path | None) -> AbstractContextManager[Decoder]: ...


def ask_timed(server: Server, path: str, body: object) -> tuple[Any, float]:
    """A server's reply, and the seconds from the request to all of it.

    Raises:
        HarnessError: the server ended (its last lines are shown), or refuses the request.
    """
    started = time.perf_counter()
    try:
        reply = ask(server.url, path, body)
    except OSError as error:
        raise HarnessError(
            f"the {server.engine} server does not answer any more",
            where=server.log or server.url,
            rule="an answer to every request",
            got=f"{error}\n{server.last_lines()}",
            fix="look for the cause in its log, and run the same again",
        ) from None
    return reply, time.perf_counter() - started
