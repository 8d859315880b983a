"""Decoding by SGLang's server, with and without a drafter, and what it counts for each request.

SGLang tells verification steps, accepted drafts (before any cut) and how many steps accepted how
many. Its `spec_accept_length` is not used: tokens given out over steps, which is too high by the
token of the prompt's own pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.checkpoint import CONFIG
from eagle3.engines.served import Answer, ServingEngine, ask_timed
from eagle3.engines.server import Launch, Server
from eagle3.engines.sglang import (
    NAME,
    VERSION,
    check_attention,
    server_infos,
    serving_launch,
    sglang_python,
)
from eagle3.errors import HarnessError
from eagle3.formats.eagle import LAYER_IDS, read_eagle_config
from eagle3.formats.published import fits_verifier
from eagle3.layer_ids import sglang_layer_ids
from eagle3.reading import read_object
from eagle3.verifier import VerifierSpec


class SGLangServing(ServingEngine):
    """Serves with SGLang."""

    name = NAME

    def check(self, drafter: Path) -> None:
        """See `ServingEngine`.

        Raises:
            HarnessError: SGLang is not installed, or would serve the drafter as something else.
        """
        if not self.settings.urls:
            sglang_python(self.settings, self.device)
        check_drafter(drafter, self.spec)

    def launch(self, drafter: Path | None, log: Path) -> Launch:
        """See `ServingEngine`."""
        return serving_launch(
            sglang_python(self.settings, self.device),
            self.spec,
            drafter,
            k=self.k,
            dtype=self.dtype,
            device=self.device,
            longest=self.max_length,
            log=log,
            arguments=self.settings.arguments,
        )

    def decoder(self, server: Server, drafter: Path | None) -> SGLangDecoder:
        """See `ServingEngine`.

        Raises:
            HarnessError: a server given by URL was started with other drafts, or its attention
                misreads the verifier.
        """
        k = 0 if drafter is None else self.k
        if self.settings.urls:
            _check_drafts(server, k)
        check_attention(server, self.spec)
        return SGLangDecoder(server, k, self.spec.eos_token_ids)


def _check_drafts(server: Server, k: int) -> None:
    wanted = {"num_steps": k or None, "eagle_topk": 1 if k else None}
    for url, info in server_infos(server).items():
        found = {name: info.get(f"speculative_{name}") for name in wanted}
        if found != wanted:
            raise HarnessError(
                "the server was started with other drafts",
                where=url,
                rule=wanted,
                got=found,
                fix="start it with these, or set evaluate.k to its num_steps",
            )


class SGLangDecoder:
    """One server, asked for one answer at a time. See `eagle3.engines.served.Decoder`.

    Args:
        k: drafts a verification step; 0 without a drafter.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, server: Server, k: int, eos_ids: Sequence[int]) -> None:
        self._server, self._k, self._eos_ids = server, k, list(eos_ids)
        self.version = VERSION  # any other is refused

    def decode(self, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
        """Decodes one answer.

        Raises:
            HarnessError: the server ended, refuses the request, or its counts disagree.
        """
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": max_tokens,
            "stop_token_ids": self._eos_ids,
        }
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling}
        reply, seconds = ask_timed(self._server, "/generate", body)
        return counted(reply, self._k, seconds=seconds, where=self._server.url)


def counted(reply: dict[str, Any], k: int, *, seconds: float, where: str) -> Answer:
    """An answer with its counts, out of what `/generate` replies.

    Raises:
        HarnessError: counts are missing or disagree.
    """
    meta = reply["meta_info"]
    steps = int(meta.get("spec_verify_ct", 0))
    accepted = int(meta.get("spec_num_correct_drafts", 0))
    histogram = [int(count) for count in meta.get("spec_correct_drafts_histogram") or []]
    if len(histogram) > k + 1 or (k == 0 and steps):
        raise HarnessError(
            "the server drafts more tokens a step than it was asked to", where=where, rule=k,
            got=histogram,
            fix=f"start it with --speculative-num-steps {k}, or without a drafter for 0",
        )  # fmt: skip
    histogram += [0] * (k + 1 - len(histogram))
    # Entry j counts the steps that accepted j drafts: all of them accepted position 1 .. j.
    per_position = [sum(histogram[position:]) for position in range(1, k + 1)]
    if sum(histogram) != steps or sum(per_position) != accepted:
        raise HarnessError(
            "the server's counts disagree", where=where,
            rule=f"{steps} steps, {accepted} accepted drafts", got=f"by step {histogram}",
            fix="the release of SGLang that `make engines` installs: others may count otherwise",
        )  # fmt: skip
    return Answer(
        token_ids=[int(token) for token in reply["output_ids"]],
        seconds=seconds,
        verify_steps=steps,
        drafted=steps * k,
        accepted=accepted,
        accepted_per_position=per_position,
    )


def check_drafter(folder: Path, spec: VerifierSpec) -> None:
    """Refuses a drafter that SGLang would load and serve as something else, or not at all.

    Raises:
        HarnessError: sizes or layers that the verifier does not have, or aux layers that SGLang
            would not read as they are meant.
    """
    where = folder / CONFIG
    values = read_object(where, fix="export the drafter again")
    config = read_eagle_config(values, where=str(where))
    fits_verifier(config, spec, where=where)
    nested = values.get("eagle_config")
    told = nested.get(LAYER_IDS) if isinstance(nested, dict) else None
    meant = sglang_layer_ids(config.aux_layers, spec.model_type)
    if told != meant:
        raise HarnessError(
            "SGLang would give the drafter other layers than it reads",
            where=f"{where}, eagle_config.{LAYER_IDS}", rule=meant,
            got="no such key: SGLang would take its defaults" if told is None else told,
            fix="export the drafter again for this verifier",
        )  # fmt: skip
