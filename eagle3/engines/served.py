"""What evaluation asks of a serving engine, whichever it is.

Knows no engine. The loop over prompts and the comparison with local decoding are elsewhere.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from eagle3.engines.server import Launch, Server, ServerSettings, ask, given_server, running
from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec


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


@dataclass(frozen=True, kw_only=True)
class ServingEngine(ABC):
    """Serves a verifier, alone or with a drafter that proposes chains of k tokens.

    Attributes:
        settings: where the server is; with `urls` the first is served plainly, the second with the
            drafter.
        device: of the verifier, for engines that have to be told.
        k: drafts a verification step.
        max_length: longest sequence, prompt and answer.
        logs: folder for the servers' logs.
    """

    name: ClassVar[str]
    settings: ServerSettings
    spec: VerifierSpec
    dtype: str
    device: str
    k: int
    max_length: int
    logs: Path

    @abstractmethod
    def check(self, drafter: Path) -> None:
        """Raises a HarnessError for what would fail, or go wrong silently, after a long start."""

    @abstractmethod
    def launch(self, drafter: Path | None, log: Path) -> Launch:
        """How its server is started. Raises a HarnessError where the engine is not installed."""

    @abstractmethod
    def decoder(self, server: Server, drafter: Path | None) -> Decoder:
        """A server that runs, once it is seen to be what was asked for."""

    @contextlib.contextmanager
    def serve(self, drafter: Path | None) -> Iterator[Decoder]:
        """A server for the length of a block.

        Raises:
            HarnessError: the engine is not installed, its server ends at start, or one given by
                URL does not answer or is another than asked for.
        """
        if self.settings.urls:
            url = self.settings.urls[0 if drafter is None else 1]
            yield self.decoder(given_server(self.name, url), drafter)
            return
        log = self.logs / f"{self.name}-{'plain' if drafter is None else 'speculative'}.log"
        with running(self.launch(drafter, log), seconds=self.settings.start_seconds) as server:
            yield self.decoder(server, drafter)


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
