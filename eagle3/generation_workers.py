"""Batched generation by several processes, each with its share of the threads and of the slots.

Of a decoding step on a CPU, what lies between the large products gains little from a second thread;
two steps side by side, on one thread each, keep both busy. Which requests share a process depends
on their order and on the number of processes alone, so the result is as repeatable as one
process's. Knows nothing of prompts' text or of files.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from eagle3.errors import HarnessError
from eagle3.generation import Completion, Request, check_fit, generate, load_for_generation
from eagle3.machine import keep_freed_memory
from eagle3.sampling import Sampling
from eagle3.verifier import HeadConfig, VerifierSpec


class Generation:
    """A verifier that generates, loaded when it is first needed; a context manager.

    Args:
        workers: processes on a CPU, each of which holds the model; 1 works in this one, as other
            devices than a CPU always do.
    """

    def __init__(
        self, spec: VerifierSpec, dtype: torch.dtype, device: str, *, workers: int
    ) -> None:
        self._source = (spec, dtype, device)
        self._count = workers if device == "cpu" else 1
        self._model: Any = None
        self._workers: list[_Worker] = []

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *args: object) -> None:
        self._model = None
        for worker in self._workers:
            worker.end()
        self._workers = []

    def start(self) -> None:
        """Loads the model, wherever it will work; nothing the second time.

        Raises:
            HarnessError: it cannot be loaded.
        """
        if self._count == 1:
            if self._model is None:
                self._model = load_for_generation(*self._source)
        elif not self._workers:
            threads = max(torch.get_num_threads() // self._count, 1)
            self._workers = [_Worker(threads, self._source) for _ in range(self._count)]
            for worker in self._workers:
                worker.receive()

    def __call__(
        self,
        config: HeadConfig,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        slots: int,
    ) -> Iterator[Completion]:
        """As `eagle3.generation.generate`, in any order; each process takes every n-th request.

        Args:
            slots: of all processes together.

        Raises:
            HarnessError: a request does not fit the context, or a process has ended.
        """
        check_fit(config, requests)
        self.start()
        if self._model is not None:
            yield from generate(self._model, config, requests, sampling, seed=seed, slots=slots)
            return
        busy: dict[Any, _Worker] = {}
        for number, worker in enumerate(self._workers):
            share = requests[number :: self._count]
            worker.ask(config, share, sampling, seed, math.ceil(slots / self._count))
            busy[worker.connection] = worker
        try:
            while busy:
                for connection in wait(list(busy)):
                    done = busy[connection].receive()
                    if isinstance(done, Completion):
                        yield done
                    else:
                        del busy[connection]
        finally:
            if busy:  # what they still answer must not be taken for the next call's
                self.__exit__()


class _Worker:
    """A process, seen from the one that started it."""

    def __init__(self, threads: int, source: tuple[VerifierSpec, torch.dtype, str]) -> None:
        # A fork of a process with threads can hang; and this one's may have used a GPU.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, threads, source), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here

    def ask(self, *task: Any) -> None:
        """Hands it the arguments of `generate` but the model."""
        self.connection.send(task)

    def receive(self) -> Any:
        """The next completion; None when it is ready for a task.

        Raises:
            HarnessError: its own, or it has ended.
        """
        try:
            got = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise HarnessError(
                "a process that generates has ended", where=f"process {self._process.pid}",
                rule="it works until all requests are answered",
                got=f"exit code {self._process.exitcode}",
                fix="its own message stands above; where there is none, memory may have run out: "
                "fewer slots or workers. What is finished is kept",
            ) from None  # fmt: skip
        if isinstance(got, HarnessError):
            raise got
        return got

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.terminate()
        self._process.join()
        self.connection.close()


def _work(
    connection: Connection[Any, Any], threads: int, source: tuple[VerifierSpec, torch.dtype, str]
) -> None:
    """What a process does: answers tasks until the other end closes, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end hears it too, and ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    keep_freed_memory()
    try:
        model = load_for_generation(*source)
        connection.send(None)
        while True:
            config, requests, sampling, seed, slots = connection.recv()
            for done in generate(model, config, requests, sampling, seed=seed, slots=slots):
                connection.send(done)
            connection.send(None)
    except HarnessError as error:
        connection.send(error)
    except (EOFError, ConnectionError):
        pass


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
