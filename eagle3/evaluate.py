"""A drafter's evaluation: what is evaluated how, and what its acceptance by replay comes to.

Decoding is in `eagle3.local_decoding` and `eagle3.served_decoding`. Knows nothing of stages or of
where results are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from eagle3.acceptance import PromptCounts, by_benchmark, distinct_share, summarise
from eagle3.checkpoint import load_drafter
from eagle3.dataset import Document, StatesDataset
from eagle3.decode import DraftChoice
from eagle3.drafter import Drafter
from eagle3.engines.server import ServerSettings
from eagle3.errors import HarnessError
from eagle3.settings import Settings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead
from eagle3.verifier_model import load_model


class EvaluateSettings(Settings):
    """How drafters are evaluated.

    Attributes:
        k: drafts a verification step.
        dtype: of replay and of timed decoding. Exactness is always checked in fp32.
        decode_prompts, decode_tokens: how much is really decoded, both ways.
        temperature: of timed decoding; 0 is greedy. Replay and exactness are greedy.
        draft: drafts of timed decoding, by argmax or sampled at the same temperature.
        engine: what decodes the same prompts besides: nothing more than the local engine, or a
            serving engine's real server, greedily, with and without the drafter.
        engine_dtype: what that server computes in; None is `dtype`. In fp32 its counts are
            compared with the local engine's, token for token.
        server: where it is.
    """

    k: int = Field(default=3, ge=1, le=16)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    decode_prompts: int = Field(default=16, ge=1)
    decode_tokens: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.0, ge=0.0)
    draft: DraftChoice = "argmax"
    engine: Literal["local", "sglang", "vllm"] = "local"
    engine_dtype: Literal["bfloat16", "float32"] | None = None
    server: ServerSettings = Field(default_factory=ServerSettings)


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a drafter checkpoint with its verifier, and where."""

    spec: VerifierSpec
    head: VerifierHead
    checkpoint: Path
    device: str

    def drafter(self, dtype: torch.dtype) -> Drafter:
        """The drafter in eval mode."""
        drafter = load_drafter(self.checkpoint, self.head, dtype).to(self.device).eval()
        return drafter.requires_grad_(False)

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The verifier."""
        return load_model(self.spec, dtype, self.device)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.head.config.eos_token_ids)


def check_states(states: StatesDataset, subject: Subject, k: int) -> None:
    """Refuses test states that do not fit, before any long work.

    Raises:
        HarnessError: of another verifier; of other layers than the drafter reads; or with answers
            that are not followed by enough tokens to count drafts past their end.
    """
    states.check(subject.head.config)
    wanted = subject.drafter(torch.bfloat16).config.aux_layers
    if list(wanted) != list(states.meta.aux_layers):
        raise HarnessError(
            "the drafter reads other layers than the states hold",
            where=f"{subject.checkpoint} and {states.folder}",
            rule=f"aux_layers {list(wanted)}",
            got=states.meta.aux_layers,
            fix="extract the test states with the drafter's layers",
        )
    check_tails(states, k, where=states.folder)


def check_tails(states: Iterable[Document], k: int, *, where: object) -> None:
    """Refuses answers that are not followed by enough tokens to count drafts past their end.

    Raises:
        HarnessError: names the sample.
    """
    for document in states:
        supervised = document.loss_mask.nonzero()[:, 0]
        tail = len(document.loss_mask) - 1 - int(supervised[-1]) if len(supervised) else -1
        if tail < k:
            raise HarnessError(
                "a test answer cannot be replayed exactly",
                where=f"{where}, sample {document.id}",
                rule=f"supervised tokens, then {k} or more of the verifier's tokens (evaluate.k)",
                got="no supervised token" if tail < 0 else f"{tail} tokens",
                fix="raise the tail of the regenerate section to k or more",
            )


def acceptance_summary(
    counts: Sequence[PromptCounts], states: Sequence[Document], drafter: Drafter
) -> dict[str, Any]:
    """By benchmark and in all: τ, rates, coverage by the draft vocabulary, output diversity."""
    answers = {item.id: item.token_ids[item.loss_mask.bool()].long() for item in states}
    can_draft = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    can_draft[drafter.target_ids(torch.arange(len(drafter.d2t), device=drafter.d2t.device))] = True
    summary = {}
    for name, group in by_benchmark(counts).items():
        tokens = torch.cat([answers[item.id] for item in group])
        summary[name] = summarise(group) | {
            "vocabulary_coverage": float(can_draft[tokens].double().mean()),
            "distinct_trigrams": distinct_share(answers[item.id].tolist() for item in group),
        }
    return summary
