"""How states lie in a shard: as they are, or in 8 bits.

`fp8` holds a state as float8_e4m3fn [N, ..., H] and a float32 scale for every row and layer: the
largest magnitude in it over 448, so that one row's outlier costs no other row anything. A value
comes back within 2**-4 of itself (or 2**-10 of the scale, which is more for what is 28,000 times
smaller than the row's largest), a row within about 2.7% of its length. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Codec = Literal["none", "fp8"]
STATES = ("aux", "final")  # what is encoded; all else lies in shards as it is
SCALE = "{}_scale"
LARGEST = 448.0  # of float8_e4m3fn
CHUNK_ROWS = 256  # bounds what is held in float32 at a time

# In the order in which they lie in a file, wide elements first: every tensor starts at a multiple
# of its element size.
STORED: dict[Codec, tuple[str, ...]] = {
    "none": ("verifier_lse", "verifier_top1", "token_ids", "aux", "final", "loss_mask"),
    "fp8": (
        "verifier_lse", "verifier_top1", "token_ids", "aux_scale", "final_scale", "aux", "final",
        "loss_mask",
    ),
}  # fmt: skip


def stored(rows: Mapping[str, Tensor], codec: Codec) -> dict[str, Tensor]:
    """The tensors of a document as a shard holds them, in the order of `STORED`."""
    found = dict(rows)
    if codec == "fp8":
        for name in STATES:
            found[name], found[SCALE.format(name)] = encode(rows[name])
    return {name: found[name] for name in STORED[codec]}


def encode(states: Tensor) -> tuple[Tensor, Tensor]:
    """Values e4m3 [N, ..., H] and scales f32 [N, ...] of finite states."""
    values = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(states.shape[:-1], dtype=torch.float32)
    for start in range(0, len(states), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        wide = states[rows].float()
        scales[rows] = wide.abs().amax(-1) / LARGEST
        divisors = scales[rows].masked_fill(scales[rows] == 0, 1.0)  # zeros stay zeros
        # A scale that is subnormal is a coarse one, and can leave a value too large.
        values[rows] = (wide / divisors.unsqueeze(-1)).clamp_(-LARGEST, LARGEST)
    return values, scales


def decode(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [N, ..., H], rounded once more to `dtype`."""
    states = torch.empty(values.shape, dtype=dtype)
    for start in range(0, len(values), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        states[rows] = values[rows].float().mul_(scales[rows].unsqueeze(-1))
    return states


def rounding(states: Tensor, codec: Codec) -> Tensor:
    """Relative error in length that a codec leaves in each row, f32 [N, ...]."""
    if codec == "none":
        return torch.zeros(states.shape[:-1])
    wide = states.float()
    apart = decode(*encode(wide), torch.float32) - wide
    return apart.norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-30)
