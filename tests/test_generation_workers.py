"""Generation by several processes: the same answers, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import HarnessError
from eagle3.generation import Request, generate
from eagle3.generation_workers import Generation
from eagle3.sampling import Sampling
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model

DRAWN = Sampling(temperature=1.0)
REQUESTS = [Request(str(n), tuple(range(5, 8 + 3 * n)), limit=6 + n) for n in range(7)]


def answers(source: Any) -> dict[str, list[int]]:
    return {done.id: done.response for done in source}


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_each_process_answers_its_share_as_one_alone_would(tiny_verifier: Path) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    model = load_model(spec, torch.float32, "cpu")
    with Generation(spec, torch.float32, "cpu", workers=2) as workers:
        for some in (REQUESTS, REQUESTS[:1]):  # of one request the second process gets nothing
            expected = {}
            for share in (some[::2], some[1::2]):
                expected |= answers(generate(model, spec, share, DRAWN, seed=3, slots=2))
            assert answers(workers(spec, some, DRAWN, seed=3, slots=3)) == expected
        pids = [child.pid for child in multiprocessing.active_children()]
        assert len(pids) == 2

        killed = workers(spec, REQUESTS, DRAWN, seed=3, slots=3)
        next(killed)
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(HarnessError, match=r"has ended[\s\S]*exit code -9[\s\S]*memory"):
            list(killed)
        # Nothing of a call that failed comes out of the next one, which starts others.
        expected = answers(generate(model, spec, REQUESTS[:1], DRAWN, seed=3, slots=1))
        assert answers(workers(spec, REQUESTS[:1], DRAWN, seed=3, slots=2)) == expected
    assert not multiprocessing.active_children()


PARENT = """
import multiprocessing, sys, time, torch
from eagle3.generation_workers import Generation
from eagle3.verifier import VerifierSpec

if __name__ == "__main__":
    generation = Generation(VerifierSpec.open(sys.argv[1]), torch.float32, "cpu", workers=2)
    generation.start()
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def test_they_end_with_a_parent_that_is_killed(tiny_verifier: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), str(tiny_verifier)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2 and all(map(alive, children))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, children))
