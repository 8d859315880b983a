"""Hidden states from SGLang servers, which leave them in files through this project's plugin.

Over HTTP go token ids only. Top-1 and log-sum-exp are computed here, from the final states and the
verifier's output matrix.

Shape suffixes: T rows of a document, n aux layers, H hidden size.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3.engines.pool import ServerPool
from eagle3.engines.server import Launch, Server, ServerSettings, ask
from eagle3.engines.sglang import (
    NAME,
    VERSION,
    check_attention,
    server_infos,
    sglang_python,
    states_launch,
)
from eagle3.errors import HarnessError
from eagle3.extraction.base import EngineIdentity, States
from eagle3.extraction.logits import VerifierOutput
from eagle3.extraction.serving import ServedStates, empty_folder, server_pool
from eagle3.layer_ids import from_sglang, sglang_capture_ids
from eagle3.verifier import VerifierSpec

log = logging.getLogger(__name__)
FILE_SECONDS = 10.0  # until a file that another machine wrote is seen here
START_ANEW = "start it anew with these, or leave server.urls out: a server is started then"
PLUGIN_FIX = (
    "install eagle3/engines/sglang_plugin in the server's environment, "
    "and set EAGLE3_STATES_DIR there"
)


@dataclass(frozen=True)
class _Wanted:
    """What a document's states have to be."""

    aux_layers: list[int]
    hidden_size: int
    dtype: torch.dtype
    model_type: str


class SGLangEngine(ServedStates):
    """Extracts through SGLang's servers.

    Args:
        folder: where the servers' plugin leaves files.
        output: the verifier's output matrix, on `device`.
        in_flight: requests of all servers together.
    """

    def __init__(
        self,
        pool: ServerPool,
        folder: Path,
        wanted: _Wanted,
        output: VerifierOutput,
        *,
        device: str,
        in_flight: int,
    ) -> None:
        identity = EngineIdentity(engine=NAME, version=VERSION, final_hidden="post_norm")
        super().__init__(identity, pool, in_flight=in_flight)
        self._folder, self._wanted, self._output = folder, wanted, output
        self._device = device
        # SGLang delivers ascending layers; ours may be in any order.
        ascending = sorted(wanted.aux_layers)
        self._columns = [ascending.index(layer) for layer in wanted.aux_layers]

    def _one(self, tokens_T: torch.Tensor) -> States:
        tensors = self._pool.call(lambda server: self._ask(server, tokens_T))
        aux_TnH = tensors["aux"].view(len(tokens_T), len(self._columns), -1)
        if self._columns != sorted(self._columns):
            aux_TnH = aux_TnH[:, self._columns].contiguous()
        top1_T, lse_T = self._output.summarise(tensors["final"].to(self._device))
        return States(aux_TnH=aux_TnH, final_TH=tensors["final"], top1_T=top1_T, lse_T=lse_T)

    def _ask(self, server: Server, tokens_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """One try. The file has a name of its own, so that a late answer to an earlier try is
        never taken for this one's."""
        rid = f"eagle3-{uuid.uuid4().hex}"
        body = {
            "rid": rid,
            "input_ids": tokens_T.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_hidden_states": True,
        }
        path = self._folder / f"{rid}.safetensors"
        try:
            answer = ask(server.url, "/generate", body)
            if answer["meta_info"].get("hidden_states"):
                raise HarnessError(
                    "the server answers with states as text: its plugin is missing or idle",
                    where=server.url, rule="a file of states for each request",
                    got="meta_info.hidden_states", fix=PLUGIN_FIX,
                )  # fmt: skip
            return self._read(path, server, tokens_T)
        finally:
            path.unlink(missing_ok=True)

    def _read(self, path: Path, server: Server, tokens_T: torch.Tensor) -> dict[str, torch.Tensor]:
        deadline = time.monotonic() + FILE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                raise HarnessError(
                    "a server answered, but its states are not there", where=path,
                    rule=f"the folder that {server.url} writes into", got="no file",
                    fix=f"{PLUGIN_FIX}; name the folder as seen from here in server.states",
                )  # fmt: skip
            time.sleep(0.02)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in ("aux", "final", "token_ids")}
                metadata = file.metadata() or {}
        except SafetensorError as error:  # cut short by a server that died or a full disk
            raise ConnectionError(f"{path}: {error}") from None
        self._check(tensors, json.loads(metadata.get("layer_ids", "null")), server, tokens_T)
        return tensors

    def _check(
        self,
        tensors: dict[str, torch.Tensor],
        layer_ids: list[int] | None,
        server: Server,
        tokens_T: torch.Tensor,
    ) -> None:
        """Raises:
        HarnessError: states of other tokens, of other layers, rows missing, or another dtype.
        """
        wanted = self._wanted
        found = from_sglang(layer_ids, wanted.model_type) if layer_ids else None
        if found != sorted(wanted.aux_layers):
            raise HarnessError(
                "the server captures other layers", where=server.url,
                rule=f"outputs of layers {sorted(wanted.aux_layers)}", got=found,
                fix="correct --return-aux-hidden-state-layer-ids, or aux_layers here",
            )  # fmt: skip
        rows, width = len(tokens_T), wanted.hidden_size
        shapes = {"aux": (rows, len(wanted.aux_layers) * width), "final": (rows, width)}
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != shape or tensors[name].dtype != wanted.dtype:
                raise HarnessError(
                    f"{name} does not fit the document", where=server.url,
                    rule=f"{wanted.dtype} {list(shape)}",
                    got=f"{tensors[name].dtype} {list(tensors[name].shape)}",
                    fix="start the server with the verifier and the dtype that are named here",
                )  # fmt: skip
        if not torch.equal(tensors["token_ids"], tokens_T.int()):
            raise HarnessError(
                "the server answered for other tokens",
                where=server.url,
                rule=f"the {len(tokens_T)} tokens of the document",
                got=f"{len(tensors['token_ids'])} tokens, not the same",
                fix="a fault of the server or of its plugin: report it",
            )


@contextlib.contextmanager
def sglang_engine(
    settings: ServerSettings,
    spec: VerifierSpec,
    aux_layers: Sequence[int],
    *,
    dtype: str,
    device: str,
    batch_tokens: int,
    longest: int,
    work: Path,
) -> Iterator[SGLangEngine]:
    """An engine on the servers that the settings name, or on one started for the block.

    Args:
        aux_layers: post-layer indices, in range.
        batch_tokens: tokens of a forward pass of a started server.
        longest: tokens of the longest document.
        work: folder for the server's log and states.

    Raises:
        HarnessError: not installed, the server ends at start or does not answer, or it was started
            so that it could not deliver whole states or would compute others.
    """
    ids = sglang_capture_ids(aux_layers, spec.model_type, spec.num_hidden_layers)
    wanted = _Wanted(list(aux_layers), spec.hidden_size, getattr(torch, dtype), spec.model_type)
    output = VerifierOutput.open(spec, wanted.dtype, device)
    folder = work / "sglang-states"
    if settings.urls:
        if settings.states is None:
            raise HarnessError(
                "where servers leave states is not said", where="server.states",
                rule="the folder that their EAGLE3_STATES_DIR names, as seen from here",
                got="null",
                fix="set server.states, or leave server.urls out: a server is started then",
            )  # fmt: skip
        folder = Path(settings.states)

    def launch() -> Launch:
        return states_launch(
            sglang_python(settings, device), spec, ids, dtype=dtype, device=device,
            batch_tokens=batch_tokens, longest=longest, folder=empty_folder(folder),
            log=work / "sglang.log", arguments=settings.arguments,
        )  # fmt: skip

    with server_pool(NAME, settings, launch) as pool:
        for server in pool.servers:
            check_attention(server, spec)
            if settings.urls:
                check_capture(server, spec, aux_layers)
        engine = SGLangEngine(
            pool,
            folder,
            wanted,
            output,
            device=device,
            in_flight=settings.in_flight * len(pool.servers),
        )
        with contextlib.closing(engine):
            yield engine


def check_capture(server: Server, spec: VerifierSpec, aux_layers: Sequence[int]) -> None:
    """Refuses a server that could not deliver whole states, before anything is asked of it.

    Raises:
        HarnessError: prefix cache or chunked prefill on, no capture, or of other layers.
    """
    infos = server_infos(server)
    if not infos:
        log.warning(
            "%s does not say how it was started: states are checked as they come", server.url
        )
    for url, info in infos.items():
        _check_capture(url, info, spec, aux_layers)


def _check_capture(
    url: str, info: Mapping[str, Any], spec: VerifierSpec, aux_layers: Sequence[int]
) -> None:
    found = info.get("return_aux_hidden_state_layer_ids")
    if not info.get("enable_return_aux_hidden_states") or not found:
        raise HarnessError(
            "the server captures no hidden states", where=url,
            rule="--speculative-algorithm EAGLE3 --enable-return-aux-hidden-states "
            "--return-aux-hidden-state-layer-ids ...",
            got=f"layer ids {found}, enable_return_aux_hidden_states "
            f"{info.get('enable_return_aux_hidden_states')}",
            fix=START_ANEW,
        )  # fmt: skip
    if from_sglang(found, spec.model_type) != sorted(aux_layers):
        raise HarnessError(
            "the server captures other layers", where=url,
            rule=f"outputs of layers {sorted(aux_layers)}",
            got=f"{from_sglang(found, spec.model_type)} (ids {found})",
            fix=START_ANEW,
        )  # fmt: skip
    whole = info.get("disable_radix_cache") and (info.get("chunked_prefill_size") or -1) < 0
    if not whole:
        raise HarnessError(
            "the server would leave rows out", where=url,
            rule="--disable-radix-cache --chunked-prefill-size -1",
            got=f"disable_radix_cache {info.get('disable_radix_cache')}, "
            f"chunked_prefill_size {info.get('chunked_prefill_size')}",
            fix=START_ANEW,
        )  # fmt: skip
