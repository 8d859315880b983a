"""What each silent mistake costs: one drafter replayed under the conventions that get mixed up.

None of them raises an error anywhere. Beside τ stands the rate that older SGLang prints,
(accepted + bonus) / (rounds x draft tokens): with 3 drafts it shows 25% where nothing is accepted.

Legend: N rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from eagle3.acceptance import PromptCounts, old_sglang_rate, summarise
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.parity import Norm
from eagle3.replay import walk
from eagle3.served_as import EMBEDDINGS, LayeredDocument, ServedAs, replayed
from eagle3.settings import Settings
from eagle3.verifier_head import VerifierHead

CHUNK_ROWS = 256
OTHER_THETA = 10_000.0  # what engines take where a drafter's config has none


class MistakesSettings(Settings):
    """documents: of the dev split, evenly; k: drafts a verification step; dtype: of replay and of
    the verifier that computes the states of other layers."""

    documents: int = Field(default=12, ge=1)
    k: int = Field(default=3, ge=1, le=16)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True)
class Mistake:
    """A convention with its name for people, and how it comes about."""

    name: str
    cause: str
    convention: ServedAs


def mistakes(right: ServedAs, config: DrafterConfig, num_hidden_layers: int) -> list[Mistake]:
    """The right convention first, then every mistake around it that drafter and verifier allow.

    Args:
        config: of the drafter, as the right convention computes it.
    """
    layers = right.aux_layers
    found = [Mistake("as trained", "", right)]

    def other_layers(name: str, cause: str, wrong: tuple[int, ...]) -> None:
        fits = all(EMBEDDINGS <= layer < num_hidden_layers for layer in wrong)
        if fits and wrong not in [item.convention.aux_layers for item in found]:
            found.append(Mistake(name, cause, replace(right, aux_layers=wrong)))

    def switched(name: str, value: Any, cause: str) -> None:
        text = str(value).lower() if isinstance(value, bool) else f"{value:g}"
        found.append(Mistake(f"{name}: {text}", cause, right.switched(name, value)))

    other_layers(
        "every layer + 1",
        "outputs of layers taken for transformers' hidden_states",
        tuple(layer + 1 for layer in layers),
    )
    other_layers(
        "every layer - 1",
        "inputs of layers captured instead of outputs",
        tuple(layer - 1 for layer in layers),
    )
    if len(layers) > 2:
        other_layers(
            "first two layers swapped",
            "another order of the ids",
            (layers[1], layers[0], *layers[2:]),
        )
    other_layers("layers in reversed order", "high to low instead of low to high", layers[::-1])
    if right.shift == 0:
        found.append(
            Mistake("states of the token before", "rows shifted by one", replace(right, shift=-1))
        )
        found.append(
            Mistake(
                "states of the token after",
                "rows shifted by one the other way; a server does not have them yet",
                replace(right, shift=1),
            )
        )
    switched(
        "norm_before_residual",
        not config.norm_before_residual,
        "engines differ in what they take where the key is missing",
    )
    switched("norm_output", not config.norm_output, "what is fed to the next draft")
    if config.rope_theta != OTHER_THETA:
        switched("rope_theta", OTHER_THETA, "the default in the place of a missing key")
    if right.rope:
        found.append(Mistake("no rotary positions", "positions lost", replace(right, rope=False)))
    if right.own_norm == 1:
        cause = "the drafter's own norm before its head"
        found.append(Mistake("last norm left out", cause, replace(right, own_norm=0)))
        found.append(Mistake("last norm twice", cause, replace(right, own_norm=2)))
    return found


def table(
    drafter: Drafter,
    layered: Sequence[LayeredDocument],
    head: VerifierHead,
    norm: Norm,
    settings: MistakesSettings,
) -> list[dict[str, Any]]:
    """One row a mistake: τ, accepted at each position, and what older SGLang would print.

    Rows with `where` "targets" are of what training asks for, which serving never reads: they count
    the drafts of a drafter that learnt the wrong targets perfectly, the most it could accept.
    """
    dtype = getattr(torch, settings.dtype)
    rows = []
    right = ServedAs(aux_layers=drafter.config.aux_layers)
    for item in mistakes(right, drafter.config, head.config.num_hidden_layers):
        counts = replayed(drafter, layered, item.convention, settings.k, dtype=dtype)
        rows.append(_row(item.name, item.cause, "serving", counts, settings.k))
    for name, cause, norms in (
        ("targets: final state without the last norm", "pre-norm taken for post-norm", 0),
        ("targets: last norm twice", "post-norm taken for pre-norm", 2),
    ):
        counts = [
            perfect(item, best_tokens(target_states(item, norms, norm), head), settings.k)
            for item in layered
        ]
        rows.append(_row(name, cause, "targets", counts, settings.k))
    return rows


def target_states(layered: LayeredDocument, norms: int, norm: Norm) -> Tensor:
    """What the verifier's head would read, [T, H], after so many last norms."""
    if norms == 0:
        return layered.outputs_TLH[:, -1]
    return layered.post_TH if norms == 1 else norm(layered.post_TH)


def perfect(layered: LayeredDocument, drafts: Tensor, k: int) -> PromptCounts:
    """Counts of a drafter whose drafts are the tokens that some targets name.

    Args:
        drafts: i64 [T], what the targets at each row name as the next token.
    """
    tokens = layered.document.token_ids.long()
    # Row t drafts the tokens from t + 2 on; their distributions stand at t + 1 and after.
    right = torch.zeros(len(tokens), k, dtype=torch.bool)
    for step in range(k):
        rows = len(tokens) - 2 - step
        right[: max(rows, 0), step] = drafts[1 + step : -1] == tokens[2 + step :]
    return walk(layered.document, right.cumprod(-1).sum(-1).tolist(), k)


def best_tokens(final_TH: Tensor, head: VerifierHead) -> Tensor:
    """Argmax of the verifier's head over states, i64; logits exist chunk by chunk."""
    weight = head.lm_head
    return torch.cat(
        [(part.to(weight.dtype) @ weight.T).max(-1).indices for part in final_TH.split(CHUNK_ROWS)]
    )


def _row(
    name: str, cause: str, where: str, counts: Sequence[PromptCounts], k: int
) -> dict[str, Any]:
    found = summarise(counts)
    return {
        "mistake": name,
        "cause": cause,
        "where": where,
        "tau": round(found["tau"], 4),
        "accepted_per_position": [round(x, 4) for x in found["per_position_unconditional"]],
        "old_sglang_rate": round(old_sglang_rate(found["tau"], k), 4),
    }
