"""Requests to one or several servers: bounded in flight, tried again when a server dies.

Knows neither engines nor what is asked. Every request is answered once, or an error says which
server failed last and how.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from eagle3.engines.server import Server
from eagle3.errors import HarnessError

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
RESTARTS = 3  # of a server that answers nothing in between

T = TypeVar("T")


@dataclass(eq=False)
class _Place:
    """A server, how many requests it works on, and since when it fails."""

    server: Server
    busy: int = 0
    failures: int = 0
    not_before: float = 0.0


class ServerPool:
    """Shares requests of several threads among servers.

    Args:
        in_flight: requests that a server works on at once.
        give_up_seconds: how long one request is tried again before its error is raised.
        restart: makes a new server of one that was started here and has ended.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        in_flight: int,
        give_up_seconds: float,
        restart: Callable[[Server], Server] | None = None,
    ) -> None:
        self._places = [_Place(server) for server in servers]
        self._in_flight = in_flight
        self._give_up_seconds = give_up_seconds
        self._restart = restart
        self._changed = threading.Condition()
        self._closed = False

    @property
    def servers(self) -> list[Server]:
        """The servers as they are now: a restarted one has another URL."""
        return [place.server for place in self._places]

    def close(self) -> None:
        """No request is started or tried again from here on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def call(self, request: Callable[[Server], T]) -> T:
        """The answer of the first server that gives one. May be called from several threads.

        Args:
            request: raises an OSError where another try may help.

        Raises:
            HarnessError: tried for `give_up_seconds`, or a server could not be started again.
        """
        first_failure: float | None = None
        while True:
            place = self._take()
            try:
                answer = request(place.server)
            except OSError as error:
                first_failure = first_failure or time.monotonic()
                self._failed(place, error)
                if time.monotonic() - first_failure > self._give_up_seconds:
                    raise HarnessError(
                        f"{place.server.engine} servers do not answer", where=place.server.url,
                        rule=f"an answer within {self._give_up_seconds:.0f} s of tries",
                        got=f"{error}\n{place.server.last_lines()}",
                        fix="start it again and repeat the command: finished shards are kept",
                    ) from None  # fmt: skip
            else:
                with self._changed:
                    place.failures = 0
                return answer
            finally:
                with self._changed:
                    place.busy -= 1
                    self._changed.notify_all()

    def _take(self) -> _Place:
        """The least busy server that may be asked, as soon as there is one."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                free = [
                    place
                    for place in self._places
                    if place.busy < self._in_flight and place.not_before <= now
                ]
                if free:
                    place = min(free, key=lambda place: (place.failures, place.busy))
                    place.busy += 1
                    return place
                paused = [p.not_before - now for p in self._places if p.busy < self._in_flight]
                self._changed.wait(max(min(paused), 0.01) if paused else None)
        raise HarnessError("the servers were given back before all requests were answered")

    def _failed(self, place: _Place, error: OSError) -> None:
        with self._changed:
            # Several requests fail with one death: only the first of them counts it.
            if place.not_before > time.monotonic() or self._closed:
                return
            place.failures += 1
            pause = min(FIRST_PAUSE * 2.0 ** (place.failures - 1), LONGEST_PAUSE)
            place.not_before = time.monotonic() + pause
            log.warning("%s: %s; tried again in %.1f s", place.server.url, error, pause)
            if self._restart is None or place.server.alive:
                return
            if place.failures > RESTARTS:
                raise HarnessError(
                    f"the {place.server.engine} server ends again and again",
                    where=place.server.log, rule=f"at most {RESTARTS} failures, no answer between",
                    got=f"its last lines\n{place.server.last_lines()}",
                    fix="look for the cause in its log; what is finished is kept",
                )  # fmt: skip
            # All others wait meanwhile: there is nobody to ask, or the rest is busy anyway.
            place.server = self._restart(place.server)
            place.not_before = 0.0
