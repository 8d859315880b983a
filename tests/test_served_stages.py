"""Stages on real engines: extraction that is killed on either side, and parity with what serves.

A tiny verifier whose last norm changes what it norms; the engines are SGLang and vLLM themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.contract import ParitySettings, check_splits, open_engine
from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from eagle3.extraction.base import ExtractSettings
from eagle3.extraction.run import extract
from eagle3.extraction.transformers import TransformersEngine
from eagle3.reference import head_norm
from eagle3.responses import Response, read_splits
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head, write_head
from stages.params import dump_yaml
from tests.engine_checks import Engine, installed
from tests.fake_server import ended
from tests.states_checks import meta_of
from tests.tiny import make_tiny_verifier

ENGINES: list[Engine] = ["sglang", "vllm"]
AUX = [0, 2, 4]
TRAIN, DEV = 120, 4
SECONDS = 1200.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> VerifierSpec:
    # vLLM's attention on CPUs wants heads of 32 or more.
    folder = tmp_path_factory.mktemp("verifier")
    make_tiny_verifier(folder, tied=False, hidden_size=256, num_hidden_layers=7, spread=0.06)
    weights = load_file(folder / "model.safetensors")
    rng = torch.Generator().manual_seed(3)
    size = weights["model.norm.weight"].shape
    weights["model.norm.weight"] = (0.5 + 2 * torch.rand(size, generator=rng)).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return VerifierSpec.open(folder)


@pytest.fixture(scope="module")
def answers(spec: VerifierSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses of all lengths, as the regenerate stage writes them."""
    folder = tmp_path_factory.mktemp("responses")
    rng = torch.Generator().manual_seed(7)
    for split, count in (("train", TRAIN), ("dev", DEV)):
        lines = []
        for number in range(count):
            length = 20 + (37 * number) % 90
            ids = torch.randint(3, spec.vocab_size, (length,), generator=rng).tolist()
            one = {"id": f"{split}-{number}", "source": "s", "token_ids": ids}
            lines.append(json.dumps({**one, "loss_mask": [[10, length]]}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def states_by_transformers(
    spec: VerifierSpec, responses: list[Response], folder: Path, layers: list[int], dtype: str
) -> StatesDataset:
    """States of some layers, in a folder that says that they are of `AUX`."""
    engine = TransformersEngine.open(spec, layers, getattr(torch, dtype), "cpu")
    meta = meta_of(spec, AUX, dtype, "transformers", "5")
    settings = ExtractSettings.model_validate({"dtype": dtype, "batch_tokens": 512})
    extract(engine, responses, folder, meta=meta, settings=settings)
    return StatesDataset.open(folder)


class Stage:
    """`stages.extract` as a program, in a folder of its own."""

    def __init__(
        self, root: Path, engine: Engine, spec: VerifierSpec, answers: Path, code: Path
    ) -> None:
        server = installed(engine, start_seconds=SECONDS).model_dump()
        params = {
            "run": {"threads": 1, "seed": 0, "device": "cpu"},
            "extract": {
                "backend": engine, "aux_layers": AUX, "dtype": "float32", "batch_tokens": 128,
                "shard_bytes": 1 << 20, "server": {**server, "in_flight": 2},
            },
        }  # fmt: skip
        (root / "params.yaml").write_text(dump_yaml(params))
        self.root, self.log = root, root / "stage.log"
        self._command = [
            *(sys.executable, "-m", "stages.extract", "--verifier", spec.source),
            *("--responses", str(answers), "--out", "states"),
        ]
        self._environment = {**os.environ, "PYTHONPATH": str(code)}

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self._command, cwd=self.root, env=self._environment, stdout=log, stderr=log
            )

    def shards(self) -> int:
        return len(list(self.root.glob(".work/extract-*/states/train/shard-*.safetensors")))

    def until(self, process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> None:
        """Returns when something has happened while the stage runs."""
        deadline = time.monotonic() + 2 * SECONDS
        while not happened():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)


def below(pid: int) -> Iterator[int]:
    """Pids of all processes below one."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from below(child)


@pytest.mark.parametrize("engine", ENGINES)
def test_extraction_is_killed_on_either_side(
    engine: Engine, spec: VerifierSpec, answers: Path, tmp_path: Path, project_root: Path
) -> None:
    """The stage is killed in the middle, then, run again, its server: no sample lost or doubled,
    and every state is the one that transformers computes."""
    stage = Stage(tmp_path, engine, spec, answers, project_root)
    first = stage.start()
    stage.until(first, lambda: stage.shards() >= 2)
    servers = list(below(first.pid))
    assert servers
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert all(ended(pid, 30.0) for pid in servers)
    kept = stage.shards()
    assert kept >= 2 and not (tmp_path / "states").exists()

    second = stage.start()
    stage.until(second, lambda: stage.shards() >= kept + 2)
    guard = next(below(second.pid))
    for pid in list(below(guard)):  # the server with all its processes; its guard reports it
        os.kill(pid, signal.SIGKILL)
    assert second.wait(2 * SECONDS) == 0, stage.log.read_text()
    text = stage.log.read_text()
    assert "tried again" in text and text.count(f"{engine} answers on") >= 2, text

    norm = None
    if engine == "vllm":
        write_head(spec, tmp_path / "head.safetensors")
        norm = head_norm(read_head(tmp_path / "head.safetensors"))
    for split, responses in read_splits(answers, vocab_size=spec.vocab_size).items():
        found = StatesDataset.open(tmp_path / "states" / split, verify=True)
        expected = states_by_transformers(spec, responses, tmp_path / split, AUX, "float32")
        assert sorted(found.ids) == sorted(response.id for response in responses)
        assert len(set(found.ids)) == len(responses)
        place = {id: number for number, id in enumerate(expected.ids)}
        for one in found:
            other = expected[place[one.id]]
            assert torch.equal(one.token_ids, other.token_ids)
            assert torch.equal(one.loss_mask, other.loss_mask)
            final = one.final if norm is None else norm(one.final)
            torch.testing.assert_close(one.aux, other.aux, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(final, other.final, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(one.verifier_lse, other.verifier_lse, rtol=1e-3, atol=1e-3)
            assert torch.equal(one.verifier_top1, other.verifier_top1)


@pytest.mark.parametrize("engine", ENGINES)
def test_parity_with_the_engine_that_serves(
    engine: Engine, spec: VerifierSpec, answers: Path, tmp_path: Path
) -> None:
    """States of transformers in bfloat16: the right ones pass, others are named, over a server."""
    responses = read_splits(answers, vocab_size=spec.vocab_size)["dev"]
    for name, layers in (("right", AUX), ("higher", [1, 3, 5]), ("swapped", [2, 0, 4])):
        states_by_transformers(spec, responses, tmp_path / name, layers, "bfloat16")
    write_head(spec, tmp_path / "head.safetensors")
    head = read_head(tmp_path / "head.safetensors")
    server = installed(engine, start_seconds=SECONDS)
    settings = ParitySettings(engine=engine, server=server, dtype="bfloat16", max_tokens=64)
    with open_engine(engine, spec, settings, "cpu", longest=200) as opened:
        found = check_splits(tmp_path / "right", head, settings, opened)[""]
        assert found["words"].startswith(f"equal to {engine} ")
        assert 0 < found["engine"]["largest_error"] < 0.05
        assert [state["found"] for state in found["engine"]["states"]] == [
            *(f"the output of layer {layer}" for layer in AUX),
            "the output of layer 6 after the last norm",
        ]
        with pytest.raises(HarnessError, match="every aux layer is one too high"):
            check_splits(tmp_path / "higher", head, settings, opened)
        with pytest.raises(HarnessError, match="order"):
            check_splits(tmp_path / "swapped", head, settings, opened)
