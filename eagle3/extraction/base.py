"""What an engine that extracts hidden states has to deliver, and which layers are asked of it.

Knows no engine. The loop over documents is in `run.py`, the layout on disk in `eagle3/dataset.py`.

Shape suffixes: T tokens of a document, n aux layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import Field

from eagle3.codec import Codec
from eagle3.engines.server import ServerSettings
from eagle3.errors import HarnessError
from eagle3.settings import Settings


class ExtractSettings(Settings):
    """How hidden states are extracted.

    `aux_layers` are post-layer indices in the order in which the drafter concatenates them; None
    stands for `default_layers`. `codec` is how states of that `dtype` are stored (`eagle3.codec`).
    `batch_tokens` bounds the padded size of a batch, `shard_bytes` the size of a shard and with it
    the memory and the work that a kill can cost. `server` says where a serving engine's servers
    are, for the backends that have one.
    """

    backend: Literal["transformers", "sglang", "vllm"] = "transformers"
    aux_layers: list[int] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    codec: Codec = "none"
    batch_tokens: int = Field(default=4096, gt=0)
    shard_bytes: int = Field(default=1 << 30, gt=0)
    server: ServerSettings = Field(default_factory=ServerSettings)


@dataclass(frozen=True, kw_only=True)
class EngineIdentity:
    """Where states come from. `final_hidden` says if `States.final` went through the last norm."""

    engine: str
    version: str
    final_hidden: Literal["pre_norm", "post_norm"]


@dataclass(frozen=True, kw_only=True)
class States:
    """What the verifier computed over one document, row t at token t, on the CPU.

    Attributes:
        aux_TnH: outputs of the asked decoder layers, residuals added.
        final_TH: the state that lm_head reads, or the one before the last norm: the engine's
            `EngineIdentity.final_hidden` says which.
        top1_T: i32, argmax of the logits over the full vocabulary.
        lse_T: f32, log-sum-exp of the logits over the full vocabulary.
    """

    aux_TnH: torch.Tensor
    final_TH: torch.Tensor
    top1_T: torch.Tensor
    lse_T: torch.Tensor


class StatesEngine(Protocol):
    """Runs a verifier over whole documents.

    What comes back for a document doesn't depend on the others in its batch, up to the rounding of
    the engine's dtype.
    """

    @property
    def identity(self) -> EngineIdentity: ...

    def extract(self, batch: Sequence[torch.Tensor]) -> list[States]:
        """One `States` for each i32[T] of token ids, in the order given."""


def default_layers(num_hidden_layers: int) -> list[int]:
    """Low, middle, high as in the EAGLE-3 code: the states that transformers' `hidden_states` 2,
    L//2 and L-3 name, said as post-layer indices."""
    return [1, num_hidden_layers // 2 - 1, num_hidden_layers - 4]


def choose_layers(asked: list[int] | None, num_hidden_layers: int, *, where: str) -> list[int]:
    """The asked layers, or the default ones, checked against the verifier.

    Raises:
        HarnessError: an index out of range or twice, or a verifier too small for the default.
    """
    layers = default_layers(num_hidden_layers) if asked is None else asked
    if not layers or len(set(layers)) != len(layers):
        fix = "the default needs a verifier of seven layers or more: name layers in the params"
        raise HarnessError(
            "aux layers cannot be used", where=f"{where}.aux_layers",
            rule="at least one, none twice", got=layers, fix=fix if asked is None else None,
        )  # fmt: skip
    if min(layers) < 0 or max(layers) >= num_hidden_layers:
        raise HarnessError(
            "the verifier has no such layer", where=f"{where}.aux_layers",
            rule=f"post-layer indices from 0 to {num_hidden_layers - 1}", got=layers,
            fix="the output of layer k is hidden_states[k + 1] of transformers",
        )  # fmt: skip
    return list(layers)
