"""Hidden states by vLLM: token ids go to its server, states come back as safetensors.

vLLM keeps the states of the asked layers in its own cache and our connector inside it
(`eagle3.engines.vllm_connector`) writes those of each finished request into a folder that server
and client share. The last state comes before the last norm, and `final_hidden` says so; the norm
and the output matrix are applied here, for argmax and log-sum-exp.

Shape suffixes: T tokens of a document, n aux layers, H hidden size.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eagle3.engines.pool import ServerPool
from eagle3.engines.server import Launch, Server, ServerSettings, ask
from eagle3.engines.vllm import NAME, check_version, launch
from eagle3.errors import HarnessError
from eagle3.extraction.base import EngineIdentity, States
from eagle3.extraction.logits import VerifierOutput
from eagle3.extraction.serving import ServedStates, empty_folder, server_pool
from eagle3.layer_ids import vllm_ids
from eagle3.reading import open_tensors
from eagle3.verifier import VerifierSpec

CONNECTOR, CONNECTOR_MODULE = "HiddenStatesConnector", "eagle3.engines.vllm_connector"
_FILE_SECONDS = 600.0


def captured_ids(aux_layers: Sequence[int], num_hidden_layers: int) -> list[int]:
    """vLLM's ids of the layers and of the final state, ascending, as it delivers them."""
    return sorted({*vllm_ids(aux_layers), num_hidden_layers})


class VllmEngine(ServedStates):
    """Extracts through vLLM's servers.

    Args:
        pool: of servers with our connector and these layers.
        spec: the verifier they serve.
        aux_layers: post-layer indices, in the order of the drafter.
        dtype: of the states.
        device: for the output matrix.
        folder: where servers leave states, as this machine sees it; None: where they say.
        in_flight: requests of all servers together.
    """

    def __init__(
        self,
        pool: ServerPool,
        spec: VerifierSpec,
        aux_layers: Sequence[int],
        *,
        dtype: torch.dtype,
        device: str,
        folder: Path | None,
        in_flight: int,
    ) -> None:
        versions = {check_version(server) for server in pool.servers}
        version = " ".join(sorted(versions))
        identity = EngineIdentity(engine=NAME, version=version, final_hidden="pre_norm")
        super().__init__(identity, pool, in_flight=in_flight)
        # Servers given by URL may offer the verifier under any name.
        self._model = ask(pool.servers[0].url, "/v1/models")["data"][0]["id"]
        self._folder, self._dtype = folder, dtype
        self._ids = captured_ids(aux_layers, spec.num_hidden_layers)
        self._columns = [self._ids.index(one) for one in vllm_ids(aux_layers)]
        self._output = VerifierOutput.open(spec, dtype, device)

    def _one(self, tokens_T: torch.Tensor) -> States:
        states_TnH = self._pool.call(lambda server: self._ask(server, tokens_T))
        final_TH = states_TnH[:, -1].clone()
        top1_T, lse_T = self._output.summarise(self._output.normed(final_TH))
        return States(
            aux_TnH=states_TnH[:, self._columns].contiguous(),
            final_TH=final_TH,
            top1_T=top1_T,
            lse_T=lse_T,
        )

    def _ask(self, server: Server, tokens_T: torch.Tensor) -> torch.Tensor:
        """States [T, n + 1, H] of one try."""
        body = {
            "model": self._model,
            "prompt": tokens_T.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "add_special_tokens": False,
        }
        reply = ask(server.url, "/v1/completions", body)
        told = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if told is None:
            raise HarnessError(
                "the vLLM server gives no hidden states",
                where=server.url,
                rule=f"a server with the connector {CONNECTOR} of {CONNECTOR_MODULE}",
                got="no hidden_states_path in its answer",
                fix="start it with this connector, or leave server.urls out: one is started then",
            )
        path = Path(told) if self._folder is None else self._folder / Path(told).name
        return self._read(path, tokens_T, server)

    def _read(self, path: Path, tokens: torch.Tensor, server: Server) -> torch.Tensor:
        """States [T, n + 1, H] of a file that the connector wrote; deletes it."""
        wait_for_file(path, server)
        with open_tensors(path, fix="extract again") as file:
            ids = json.loads((file.metadata() or {}).get("layer_ids", "null"))
            read: torch.Tensor = file.get_tensor("hidden_states").to(self._dtype)
            told: torch.Tensor = file.get_tensor("token_ids")
        path.unlink()
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        if ids != self._ids:
            raise HarnessError(
                "the vLLM server captures other layers than are asked for",
                where=server.url,
                rule=f"eagle_aux_hidden_state_layer_ids {self._ids}",
                got=ids,
                fix="start it anew with these ids, or correct aux_layers here",
            )
        if len(read) != len(tokens) or not torch.equal(told.to(tokens), tokens):
            raise HarnessError(
                "the vLLM server's states are not those of the tokens",
                where=server.url,
                rule=f"one row for each of {len(tokens)} tokens",
                got=f"{len(read)} rows for {len(told)} tokens",
                fix="start the server without prefix cache and chunked prefill",
            )
        return read


def wait_for_file(path: Path, server: Server) -> None:
    """Returns when a connector has written a request's file, whole.

    The answer comes before the file: whoever writes it holds a lock until it is there.

    Raises:
        ConnectionError: the server ended first.
        HarnessError: it does not come.
    """
    lock, deadline = path.with_name(f"{path.name}.lock"), time.monotonic() + _FILE_SECONDS
    while not lock.exists() and server.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    if lock.exists():
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    if not path.exists() and not server.alive:
        raise ConnectionError(f"{server.url} ended before it wrote {path.name}")
    if not path.exists():
        raise HarnessError(
            "vLLM did not write a request's hidden states",
            where=path,
            rule="a folder that server and client share, with room left",
            fix="name the folder as seen from here in server.states",
            got=server.last_lines(),
        )


@contextlib.contextmanager
def vllm_engine(
    settings: ServerSettings,
    spec: VerifierSpec,
    aux_layers: Sequence[int],
    *,
    dtype: str,
    device: str,
    batch_tokens: int,
    longest: int,
    work: Path,
) -> Iterator[VllmEngine]:
    """An engine on a server started for the length of a block, or on servers given by URL.

    Args:
        batch_tokens: tokens in one of vLLM's forward passes.
        longest: tokens of the longest document.
        work: folder for log and states in passing.

    Raises:
        HarnessError: vLLM is not installed, a server ends at start, or does not answer.
    """

    def start() -> Launch:
        return launch(
            settings,
            spec,
            dtype=dtype,
            log=work / "vllm.log",
            arguments=extraction_arguments(
                captured_ids(aux_layers, spec.num_hidden_layers),
                empty_folder(work / "vllm-states"),
                max_length=longest + 1,  # vLLM cannot but generate one token
                batch_tokens=batch_tokens,
                in_flight=settings.in_flight,
            ),
            # A document may fill the verifier's context to the last position.
            environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        )

    with server_pool(NAME, settings, start) as pool:
        engine = VllmEngine(
            pool,
            spec,
            aux_layers,
            dtype=getattr(torch, dtype),
            device=device,
            folder=Path(settings.states) if settings.urls and settings.states else None,
            in_flight=settings.in_flight * len(pool.servers),
        )
        with contextlib.closing(engine):
            yield engine


def extraction_arguments(
    layer_ids: Sequence[int], states: Path, *, max_length: int, batch_tokens: int, in_flight: int
) -> list[str]:
    """Command line of a vLLM server that extracts; the way to start one by hand, too.

    Args:
        layer_ids: as vLLM counts.
        states: folder for the files.
    """
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states.resolve())},
    }
    return [
        "--max-model-len", str(max_length),
        "--max-num-batched-tokens", str(batch_tokens),
        "--max-num-seqs", str(in_flight),
        "--no-enable-prefix-caching",
        "--speculative-config", json.dumps(speculation),
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
