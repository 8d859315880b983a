"""Decoding by vLLM's server, with and without a drafter, and what it counts.

vLLM counts for a whole server, so requests go one after the other and counts are differences of its
counters. A server started here also tells each request's own counts, and both have to agree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.engines.served import Answer, ServingEngine, ask_timed
from eagle3.engines.server import Launch, Server, ask
from eagle3.engines.vllm import (
    NAME,
    Counters,
    check_version,
    launch,
    read_counters,
    vllm_python,
)
from eagle3.errors import HarnessError
from eagle3.formats.eagle import LAYER_IDS
from eagle3.layer_ids import vllm_ids
from eagle3.reading import read_object

_SETTLE_SECONDS = 10.0


class VllmServing(ServingEngine):
    """Serves with vLLM."""

    name = NAME

    def check(self, drafter: Path) -> None:
        """See `ServingEngine`.

        Raises:
            HarnessError: vLLM is not installed, or would feed the drafter other layers than it
                reads: it knows them by one key alone, and feeds them in ascending order.
        """
        if not self.settings.urls:
            vllm_python(self.settings)
        where = drafter / "config.json"
        values = read_object(where, fix="export the drafter again")
        layers, told = values.get("aux_layers"), values.get(LAYER_IDS)
        if not told or (layers and told != vllm_ids(layers)):
            raise HarnessError(
                "vLLM would give the drafter other layers than it reads",
                where=f"{where}, {LAYER_IDS}",
                rule="transformers' hidden_states indices of its aux layers",
                got=f"{told} for the outputs of layers {layers}",
                fix="export the drafter again",
            )
        if list(told) != sorted(told):
            raise HarnessError(
                "vLLM would give the drafter its layers in another order",
                where=f"{where}, {LAYER_IDS}", rule="ascending", got=told,
                fix="train with ascending aux layers to serve in vLLM",
            )  # fmt: skip

    def launch(self, drafter: Path | None, log: Path) -> Launch:
        """See `ServingEngine`."""
        arguments = ["--max-model-len", str(self.max_length), "--no-enable-prefix-caching"]
        arguments += ["--max-num-seqs", "4"]
        if drafter is not None:
            speculation = {
                "method": "eagle3",
                "model": str(drafter.resolve()),
                "num_speculative_tokens": self.k,
            }
            arguments += ["--speculative-config", json.dumps(speculation)]
            arguments += ["--per-request-spec-decode-metrics", "detailed"]
        return launch(self.settings, self.spec, dtype=self.dtype, log=log, arguments=arguments)

    def decoder(self, server: Server, drafter: Path | None) -> VllmDecoder:
        """See `ServingEngine`."""
        return VllmDecoder(server, drafts=drafter is not None)


class VllmDecoder:
    """One server, asked for one answer at a time. See `eagle3.engines.served.Decoder`."""

    def __init__(self, server: Server, *, drafts: bool) -> None:
        self._server = server
        self._drafts = drafts
        self.version = check_version(server)
        self._model = str(ask(server.url, "/v1/models")["data"][0]["id"])
        self._before = read_counters(server.url)

    def decode(self, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
        """Decodes one answer.

        Raises:
            HarnessError: the server ended, refuses the request, or its counts disagree.
        """
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        reply, seconds = ask_timed(self._server, "/v1/completions", body)
        token_ids = [int(token) for token in reply["choices"][0]["token_ids"]]
        counted = self._count(len(token_ids))
        own = (reply.get("metrics") or {}).get("speculative_decoding")
        if own is not None:
            self._agree(counted, own)
        steps = own and own.get("per_step_accepted")
        return Answer(
            token_ids=token_ids,
            seconds=seconds,
            verify_steps=counted.drafts,
            drafted=counted.drafted,
            accepted=counted.accepted,
            accepted_per_position=list(counted.per_position),
            accepted_per_step=None if steps is None else [int(step) for step in steps],
        )

    def _count(self, tokens: int) -> Counters:
        """Differences since the last request: counters follow an answer by some milliseconds."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = read_counters(self._server.url)
            difference = now.since(self._before)
            if difference.generated >= tokens:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if difference.generated != tokens or (self._drafts and not now.per_position):
            raise HarnessError(
                "the vLLM server's counters do not belong to this request",
                where=self._server.url,
                rule=f"{tokens} generated tokens"
                + (" and counts of speculative decoding" if self._drafts else ""),
                got=f"{difference.generated}, {len(now.per_position)} draft positions",
                fix="a server that nobody else uses meanwhile, started with the drafter",
            )
        self._before = now
        return difference

    def _agree(self, counted: Counters, own: dict[str, Any]) -> None:
        told = (own["num_spec_steps"], own["num_draft_tokens"], own["num_accepted_draft_tokens"])
        if told != (counted.drafts, counted.drafted, counted.accepted):
            raise HarnessError(
                "vLLM's counters and its counts of the request disagree",
                where=self._server.url,
                rule=f"steps, drafted, accepted {told}",
                got=(counted.drafts, counted.drafted, counted.accepted),
                fix="a server that nobody else uses meanwhile",
            )
