"""SGLang's own router before two servers: extraction through it is the same, though one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.dataset import StatesDataset
from eagle3.engines.server import Launch, Server, ServerSettings, held_port, running
from eagle3.engines.sglang import sglang_python, states_launch
from eagle3.errors import HarnessError
from eagle3.extraction.base import ExtractSettings
from eagle3.extraction.run import extract
from eagle3.extraction.sglang import check_capture, sglang_engine
from eagle3.layer_ids import sglang_capture_ids
from eagle3.responses import Response
from eagle3.verifier import VerifierSpec
from tests.engine_checks import installed
from tests.fake_server import TELLS, launch
from tests.states_checks import compare, meta_of

LAYERS = [3, 0, 2]
COUNT = 160


def answers(spec: VerifierSpec) -> list[Response]:
    draw = torch.Generator().manual_seed(1)
    return [
        Response(
            id=f"r{number}", source="s", loss_mask=[(0, 20)],
            token_ids=torch.randint(
                3, spec.vocab_size, (20 + 37 * number % 90,), generator=draw
            ).tolist(),
        )
        for number in range(COUNT)
    ]  # fmt: skip


def router(servers: list[Server], metrics: int, folder: Path) -> Launch:
    python = sglang_python(installed("sglang"), device="cpu")

    def command(host: str, port: int) -> list[str | Path]:
        address = ["--host", host, "--port", str(port), "--prometheus-port", str(metrics)]
        shared = ["--policy", "round_robin", "--worker-urls", *[one.url for one in servers]]
        return [python, "-m", "sglang_router.launch_router", *address, *shared]

    return Launch(engine="sglang-router", log=folder / "router.log", command=command)


@pytest.mark.slow
def test_a_server_behind_the_router_that_would_leave_rows_out_is_refused(
    llama: VerifierSpec, tmp_path: Path
) -> None:
    """The router tells where its servers are, and each of them how it was started."""
    right = {
        "version": "0.5.23", "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": sglang_capture_ids(
            LAYERS, llama.model_type, llama.num_hidden_layers
        ),
        "disable_radix_cache": True, "chunked_prefill_size": -1,
    }  # fmt: skip

    def tells(info: dict[str, Any]) -> Launch:
        return launch(tmp_path, TELLS.replace('{"version": "0.1.0"}', repr(info)))

    with (
        running(tells(right)) as whole,
        running(tells(right | {"chunked_prefill_size": 64})) as chunked,
        held_port() as metrics,
    ):
        with running(router([whole], metrics, tmp_path)) as before:
            check_capture(before, llama, LAYERS)
        with (
            running(router([whole, chunked], metrics, tmp_path)) as before,
            pytest.raises(HarnessError, match=rf"leave rows out[\s\S]*{chunked.url}") as caught,
        ):
            check_capture(before, llama, LAYERS)
        assert "chunked_prefill_size 64" in str(caught.value)


@pytest.mark.slow
def test_a_server_dies_behind_the_router(llama: VerifierSpec, tmp_path: Path) -> None:
    """No sample is lost or doubled, and every state is transformers'."""
    spec = llama
    states = tmp_path / "left-by-servers"
    states.mkdir()
    python = sglang_python(installed("sglang"), device="cpu")

    def captures(number: int) -> Launch:
        return states_launch(
            python, spec, sglang_capture_ids(LAYERS, spec.model_type, spec.num_hidden_layers),
            dtype="float32", device="cpu", batch_tokens=256, longest=120, folder=states,
            log=tmp_path / f"server{number}.log", arguments=[],
        )  # fmt: skip

    def kill(server: Server) -> None:
        while len(list((tmp_path / "states").glob("shard-*"))) < 2:
            time.sleep(0.01)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)

    with (
        running(captures(1)) as lives,
        running(captures(2)) as dies,
        held_port() as metrics,
        running(router([lives, dies], metrics, tmp_path)) as before,
    ):
        given = ServerSettings(urls=[before.url], states=str(states), give_up_seconds=60)
        settings = ExtractSettings(
            backend="sglang", dtype="float32", batch_tokens=128, shard_bytes=1 << 18
        )
        killer = threading.Thread(target=kill, args=[dies], daemon=True)
        killer.start()
        with sglang_engine(
            given, spec, LAYERS, dtype="float32", device="cpu", batch_tokens=128, longest=120,
            work=tmp_path / "work",
        ) as engine:  # fmt: skip
            done = extract(
                engine, answers(spec), tmp_path / "states", settings=settings, ahead=8,
                meta=meta_of(spec, LAYERS, "float32", "sglang", "0.5.23"),
            )  # fmt: skip
        killer.join(10)
        assert lives.alive and not dies.alive
    # Both have served some before.
    for number in (1, 2):
        assert "POST /generate" in (tmp_path / f"server{number}.log").read_text()
    dataset = StatesDataset.open(tmp_path / "states", verify=True)
    assert done.tokens == sum(len(one.token_ids) for one in answers(spec))
    assert sorted(dataset.ids) == sorted(one.id for one in answers(spec))
    errors = compare(spec, dataset, "float32")
    assert set(errors) == {*LAYERS, "final", "lse"}
    assert max(errors.values()) < 2e-5, errors
