"""States of SGLang itself, on this machine: they are transformers', or the server is refused."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from eagle3.dataset import StatesDataset
from eagle3.engines.server import ServerSettings, ask
from eagle3.errors import HarnessError
from eagle3.extraction.base import ExtractSettings
from eagle3.extraction.run import extract
from eagle3.extraction.sglang import check_capture, sglang_engine
from eagle3.verifier import VerifierSpec
from tests.engine_checks import installed
from tests.states_checks import LENGTHS, compare, meta_of, responses

SGLANG = installed("sglang")
meta = partial(meta_of, engine="sglang", version="0.5.23")


@pytest.mark.slow
def test_states_are_those_of_transformers(llama: VerifierSpec, tmp_path: Path) -> None:
    """On every layer that SGLang captures, in an order of our own. The server is killed on the way:
    nothing is lost or doubled."""
    spec = llama
    layers = [3, 0, *range(1, 3), *range(4, spec.num_hidden_layers - 1)]
    extraction = ExtractSettings(backend="sglang", dtype="float32", batch_tokens=64, shard_bytes=1)
    with sglang_engine(
        SGLANG, spec, layers, dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        server = engine.servers[0]
        check_capture(server, spec, layers)
        with pytest.raises(HarnessError, match="captures other layers"):
            check_capture(server, spec, layers[1:])
        # The scheduler dies in the middle of the run.
        first = extract(
            engine, responses(spec)[:4], tmp_path / "states", meta=meta(spec, layers, "float32"),
            settings=extraction, ahead=2,
        )  # fmt: skip
        assert first.tokens == sum(LENGTHS[:4])
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        whole = extract(
            engine, responses(spec), tmp_path / "all", meta=meta(spec, layers, "float32"),
            settings=extraction, ahead=3,
        )  # fmt: skip
    assert whole.tokens == sum(LENGTHS)
    assert not list((tmp_path / "sglang-states").iterdir())
    dataset = StatesDataset.open(tmp_path / "all", verify=True)
    assert sorted(dataset.ids) == [f"r{i}" for i in range(len(LENGTHS))]
    errors = compare(spec, dataset, "float32")
    assert set(errors) == {*layers, "final", "lse"}
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.slow
def test_states_in_bfloat16(llama: VerifierSpec, tmp_path: Path) -> None:
    layers = [0, 2, 4]
    extraction = ExtractSettings(backend="sglang", dtype="bfloat16", batch_tokens=64)
    with sglang_engine(
        SGLANG, llama, layers, dtype="bfloat16", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        extract(
            engine, responses(llama), tmp_path / "states", meta=meta(llama, layers, "bfloat16"),
            settings=extraction,
        )  # fmt: skip
    errors = compare(llama, StatesDataset.open(tmp_path / "states"), "bfloat16")
    assert max(errors.values()) < 0.05, errors


@pytest.mark.slow
def test_a_server_that_would_leave_rows_out_is_refused(llama: VerifierSpec, tmp_path: Path) -> None:
    """By the client before anything is asked, and by the plugin for a request that gets through."""
    chunked = SGLANG.model_copy(update={"arguments": ["--chunked-prefill-size", "32"]})
    with sglang_engine(
        chunked, llama, [0, 2], dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        with pytest.raises(HarnessError, match=r"leave rows out[\s\S]*chunked_prefill_size 32"):
            check_capture(engine.servers[0], llama, [0, 2])
        (short,) = engine.extract([torch.arange(5, 25, dtype=torch.int32)])
        assert len(short.final_TH) == 20
        with pytest.raises(HarnessError, match=r"refuses[\s\S]*8 rows for 40 tokens"):
            engine.extract([torch.arange(5, 45, dtype=torch.int32)])
        body = {"input_ids": [5, 6], "rid": "../escape", "return_hidden_states": True}
        with pytest.raises(HarnessError, match="no file name"):
            ask(engine.servers[0].url, "/generate", body)


def test_without_sglang_the_way_to_it_is_named(llama: VerifierSpec, tmp_path: Path) -> None:
    nowhere = ServerSettings(environment=str(tmp_path))
    open_engine = sglang_engine(
        nowhere, llama, [0], dtype="float32", device="cpu", batch_tokens=8, longest=8, work=tmp_path
    )
    with pytest.raises(HarnessError, match=r"not installed[\s\S]*make engines"), open_engine:
        pass
    given = ServerSettings(urls=["http://127.0.0.1:9"])
    open_engine = sglang_engine(
        given, llama, [0], dtype="float32", device="cpu", batch_tokens=8, longest=8, work=tmp_path
    )
    with pytest.raises(HarnessError, match=r"server\.states"), open_engine:
        pass
