"""RoPE: how queries and keys of a drafter turn with their positions.

Knows numbers of a config, not the layer that reads what is turned.

Legend: N rows, A attention heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3.errors import HarnessError

if TYPE_CHECKING:
    from eagle3.drafter import DrafterConfig


def inverse_frequencies(config: DrafterConfig) -> Tensor:
    """RoPE's inverse frequencies, float32 [E/2]; scaled kinds as transformers defines them."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**half)
    scaling: Mapping[str, Any] = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain
    return _scaled_frequencies(config, kind)


def _scaled_frequencies(config: DrafterConfig, kind: str) -> Tensor:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = (
        "plain RoPE, as published drafters have: rope_scaling: null in its config.json; for a new "
        "drafter, drafter.rope_theta"
    )
    if kind not in ROPE_INIT_FUNCTIONS:
        raise HarnessError(
            "unknown RoPE scaling",
            where="drafter config, rope_scaling",
            rule=f"one of {', '.join(sorted(ROPE_INIT_FUNCTIONS))}",
            got=kind,
            fix=plain,
        )
    try:
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_theta": config.rope_theta, **(config.rope_scaling or {})},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise HarnessError(
            "RoPE scaling that cannot be computed",
            where="drafter config, rope_scaling",
            rule=f"the numbers of {kind}, as transformers reads them ({error})",
            got=config.rope_scaling,
            fix=plain,
        ) from None
    if factor != 1.0:
        raise HarnessError(
            "this RoPE scaling also scales attention, which the drafter does not do",
            where="drafter config, rope_scaling",
            rule="a scaling of positions alone",
            got=config.rope_scaling,
            fix=plain,
        )
    return frequencies.float()


def rotary(
    positions_N: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [N, E/2], angles computed in float64 when dtype is float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions_N.to(wide)[:, None] * inverse_frequencies.to(wide)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_NAE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head against each other, as Llama does."""
    first, second = x_NAE.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
