"""Requests shared among servers that die, come back, or never do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle3.engines import pool as pool_module
from eagle3.engines.pool import ServerPool
from eagle3.engines.server import Server
from eagle3.errors import HarnessError


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE", 0.01)


def servers(count: int) -> list[Server]:
    return [Server(engine="fake", url=f"http://127.0.0.1:{n}") for n in range(count)]


def test_every_request_is_answered_once_though_a_server_dies() -> None:
    lock, asked, working = threading.Lock(), Counter[str](), Counter[str]()
    most = 0

    def request(number: int, server: Server) -> int:
        nonlocal most
        with lock:
            asked[server.url] += 1
            working[server.url] += 1
            most = max(most, working[server.url])
            # The second server fails from its fifth request to its twelfth, then is well again.
            dies = server.url.endswith(":1") and 5 <= asked[server.url] <= 12
        time.sleep(0.002)
        with lock:
            working[server.url] -= 1
        if dies:
            raise ConnectionResetError("it died")
        return number

    pool = ServerPool(servers(2), in_flight=3, give_up_seconds=20)
    deadline = time.monotonic() + 20
    with ThreadPoolExecutor(12) as threads:
        # How many requests pass by during its pauses is the machine's business: until it is well.
        while asked["http://127.0.0.1:1"] <= 12 and time.monotonic() < deadline:
            answers = list(
                threads.map(lambda n: pool.call(lambda server: request(n, server)), range(100))
            )
            assert answers == list(range(100))
    assert most == 3
    assert asked["http://127.0.0.1:1"] > 12  # it was asked again


def test_a_server_that_stays_dead_is_an_error() -> None:
    def request(server: Server) -> None:
        raise ConnectionRefusedError("nobody there")

    pool = ServerPool(servers(1), in_flight=1, give_up_seconds=0.1)
    with pytest.raises(HarnessError, match=r"do not answer[\s\S]*nobody there"):
        pool.call(request)


def test_an_error_of_the_request_is_not_tried_again() -> None:
    tries = []

    def request(server: Server) -> None:
        tries.append(server)
        raise HarnessError("the server refuses a request")

    with pytest.raises(HarnessError, match="refuses"):
        ServerPool(servers(2), in_flight=1, give_up_seconds=5).call(request)
    assert len(tries) == 1


class Ended(Server):
    """A started server whose process has ended."""

    @property
    def alive(self) -> bool:
        return False


def test_an_ended_server_is_started_again_a_few_times() -> None:
    started = []

    def restart(dead: Server) -> Server:
        started.append(dead.url)
        return Ended(engine="fake", url=f"http://127.0.0.1:{10 + len(started)}")

    def request(server: Server) -> str:
        if server.url.endswith(":12"):
            return server.url
        raise ConnectionResetError("it died")

    first = Ended(engine="fake", url="http://127.0.0.1:9")
    pool = ServerPool([first], in_flight=2, give_up_seconds=5, restart=restart)
    assert pool.call(request) == "http://127.0.0.1:12"
    assert started == ["http://127.0.0.1:9", "http://127.0.0.1:11"]
    pool = ServerPool([first], in_flight=2, give_up_seconds=5, restart=lambda dead: dead)
    with pytest.raises(HarnessError, match="ends again and again"):
        pool.call(request)


def test_a_closed_pool_answers_nothing() -> None:
    pool = ServerPool(servers(1), in_flight=1, give_up_seconds=5)
    pool.close()
    with pytest.raises(HarnessError, match="given back"):
        pool.call(lambda server: 1)
