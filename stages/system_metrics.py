"""What a run costs its machine: processor, memory and traffic over time, as metrics of the run.

Samples go to the run's journal like everything else it says, so that no store has to answer. MLflow
shows names that begin with `system/` on a page of their own. Knows nothing of what runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

PREFIX = "system/"
SECONDS = 10.0  # between samples; one takes about a millisecond
MEGABYTE = 1e6


class Sampler:
    """The state of the machine and of this process, each since the sample before.

    `process_*` is this process with its children, of which a stage has several where an engine
    serves it: processor time in percent of one core, memory resident. `gpu_*` is all of a device
    that torch has in use here, whoever takes it.
    """

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._children: dict[int, psutil.Process] = {}
        self._network = psutil.net_io_counters()
        self._folder = str(Path.cwd())
        # Both answer with what happened since they were last asked.
        self._process.cpu_percent()
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Values by name, in percent and megabytes (10^6 bytes)."""
        memory = psutil.virtual_memory()
        busy, resident = self._own()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / MEGABYTE,
            "system_memory_usage_percentage": memory.percent,
            "process_cpu_percentage": busy,
            "process_memory_megabytes": resident / MEGABYTE,
            "disk_available_megabytes": psutil.disk_usage(self._folder).free / MEGABYTE,
        }
        network = psutil.net_io_counters()
        if network is not None and self._network is not None:
            sent = network.bytes_sent - self._network.bytes_sent
            received = network.bytes_recv - self._network.bytes_recv
            found["network_transmit_megabytes"] = sent / MEGABYTE
            found["network_receive_megabytes"] = received / MEGABYTE
        return {f"{PREFIX}{name}": value for name, value in (found | gpu_memory()).items()}

    def _own(self) -> tuple[float, int]:
        living = {child.pid: child for child in self._process.children(recursive=True)}
        # The objects of the last time: theirs is the time since then.
        self._children = {pid: self._children.get(pid, child) for pid, child in living.items()}
        busy, resident = 0.0, 0
        for process in (self._process, *self._children.values()):
            try:
                busy += process.cpu_percent()
                resident += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return busy, resident


def gpu_memory() -> dict[str, float]:
    """Memory of every device on which this process has a CUDA context; makes none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    found = {}
    for number in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(number):
            continue
        free, total = torch.cuda.mem_get_info(number)
        found[f"gpu_{number}_memory_usage_megabytes"] = (total - free) / MEGABYTE
        found[f"gpu_{number}_memory_usage_percentage"] = 100 * (total - free) / total
        found[f"gpu_{number}_process_peak_megabytes"] = (
            torch.cuda.max_memory_allocated(number) / MEGABYTE
        )
    return found


class Watch:
    """Samples in a thread, until it is stopped; the last sample is taken then.

    Args:
        log: takes values and the sample's number.
        first: number of the first sample, behind those of a killed run that is taken up.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float], int], None],
        *,
        first: int = 0,
        seconds: float = SECONDS,
    ) -> None:
        self._log = log
        self._number = first
        self._seconds = seconds
        self._stopped = threading.Event()
        self._sampler = Sampler()
        self._thread = threading.Thread(target=self._run, daemon=True, name="system metrics")
        self._thread.start()

    def stop(self) -> None:
        """Ends it; nothing is said after that."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        # What cannot be read now (a folder that is gone, a device that is lost) is no run's fault.
        with contextlib.suppress(OSError, RuntimeError, psutil.Error):
            self._log(self._sampler.sample(), self._number)
            self._number += 1
