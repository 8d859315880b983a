"""What extraction through servers has in common: a pool of them, asked by several threads.

Knows no engine: whoever does says how a server is started, and asks one document of it.

Shape suffixes: T tokens of a document.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from eagle3.engines.pool import ServerPool
from eagle3.engines.server import Launch, Server, ServerSettings, given_server, start_server
from eagle3.extraction.base import EngineIdentity, States


class ServedStates(ABC):
    """Extracts through a pool of servers; several threads may ask at once.

    Args:
        in_flight: requests of all servers together.
    """

    def __init__(self, identity: EngineIdentity, pool: ServerPool, *, in_flight: int) -> None:
        self.identity = identity
        self._pool = pool
        self._threads = ThreadPoolExecutor(in_flight, thread_name_prefix=identity.engine)

    @property
    def servers(self) -> list[Server]:
        """The servers as they are now."""
        return self._pool.servers

    def extract(self, batch: Sequence[torch.Tensor]) -> list[States]:
        """See `StatesEngine.extract`.

        Raises:
            HarnessError: no server answers, or states came back that are not those of the tokens.
        """
        return list(self._threads.map(self._one, batch))

    def close(self) -> None:
        """Gives up what is still asked."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    def _one(self, tokens_T: torch.Tensor) -> States:
        """The states of one document, by whichever server answers."""


@contextlib.contextmanager
def server_pool(
    engine: str, settings: ServerSettings, launch: Callable[[], Launch]
) -> Iterator[ServerPool]:
    """The servers that the settings name, or one that is started for the block and, when it dies,
    again.

    Args:
        launch: how to start one; not called where servers are named.

    Raises:
        HarnessError: a named server does not answer, or one cannot be started.
    """
    with contextlib.ExitStack() as stack:
        restart: Callable[[Server], Server] | None = None
        if settings.urls:
            servers = [given_server(engine, url) for url in settings.urls]
        else:
            start = launch()

            def started() -> Server:
                server = start_server(start, seconds=settings.start_seconds)
                stack.callback(server.stop)
                return server

            def restart(dead: Server) -> Server:
                dead.stop()
                return started()

            servers = [started()]
        yield ServerPool(
            servers,
            in_flight=settings.in_flight,
            give_up_seconds=settings.give_up_seconds,
            restart=restart,
        )


def empty_folder(folder: Path) -> Path:
    """The folder, there and without the files of a killed run."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    return folder
