"""What a run says of its machine: values against the system's own, numbering over a restart."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages.sending import open_client
from stages.system_metrics import PREFIX, Sampler, Watch
from stages.tracking import MlflowTracker, Store

HOLD = "held = bytearray(b'x' * 300_000_000); print('ready', flush=True); input()"


def test_memory_of_a_child_counts() -> None:
    sampler = Sampler()
    before = sampler.sample()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    during = sampler.sample()
    child.communicate("\n")
    after = sampler.sample()
    name = f"{PREFIX}process_memory_megabytes"
    assert 300 < during[name] - before[name] < 400
    assert abs(after[name] - before[name]) < 50


def test_processor_time_is_that_of_the_system() -> None:
    sampler = Sampler()
    started, spent = time.monotonic(), time.process_time()
    while time.process_time() - spent < 0.5:
        sum(range(10_000))
    found = sampler.sample()[f"{PREFIX}process_cpu_percentage"]
    share = (time.process_time() - spent) / (time.monotonic() - started)
    assert found == pytest.approx(100 * share, rel=0.2)


def test_the_machine_as_the_system_says() -> None:
    found = Sampler().sample()
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(Path.cwd()))
    used = (memory.total - memory.available) / 1e6
    assert found[f"{PREFIX}system_memory_usage_megabytes"] == pytest.approx(used, rel=0.2)
    assert found[f"{PREFIX}disk_available_megabytes"] == pytest.approx(disk.free / 1e6, rel=0.1)
    assert 0 <= found[f"{PREFIX}cpu_utilization_percentage"] <= 100


def test_samples_until_stopped_and_one_more() -> None:
    said: list[tuple[dict[str, float], int]] = []
    watch = Watch(lambda values, number: said.append((values, number)), first=4, seconds=0.02)
    while len(said) < 2:
        time.sleep(0.01)
    before = len(said)
    watch.stop()
    assert [number for _, number in said] == list(range(4, 4 + len(said)))
    assert len(said) > before
    time.sleep(0.1)
    assert len(said) == said[-1][1] - 3


def test_a_sample_that_fails_ends_nothing() -> None:
    numbers: list[int] = []

    def log(values: dict[str, float], number: int) -> None:
        numbers.append(number)
        if len(numbers) == 1:
            raise OSError("the folder is gone")

    watch = Watch(log, seconds=0.02)
    while len(numbers) < 3:
        time.sleep(0.01)
    watch.stop()
    assert numbers[:3] == [0, 0, 1]


def test_a_run_that_is_taken_up_counts_on(tmp_path: Path, store: Store) -> None:
    ids = set()
    for status in ("KILLED", "FINISHED"):
        tracker = MlflowTracker(
            store, tmp_path / "journals", run_name="train", resume_key="train-1", watch=True
        )
        ids.add(tracker.close(status)["run_id"])
    (run_id,) = ids
    client, _ = open_client(store)
    points = client.get_metric_history(str(run_id), f"{PREFIX}process_memory_megabytes")
    assert sorted(point.step for point in points) == [0, 1]
    assert all(10 < point.value < 100_000 for point in points)
