"""Are stored states the ones that serving will see? Compared by value, under every reading.

A stored tensor is declared to be one thing (the output of layer 14, row t at token t; the last
state after the last norm). Here it is held against what an engine computes for the same tokens: the
output of every layer, before and after the last norm, at every row. What it comes nearest to is
what it is: `eagle3.parity_verdict` says how near is near enough, `eagle3.parity_faults` puts the
differences into words.

Pure functions; knows no engine and no files.

Legend: T tokens of a document, R its stored rows, n aux layers, H hidden size, L reference layers,
C readings, S stored tensors (n aux and the final one), P probed rows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3.codec import Codec, rounding
from eagle3.drafter import rms_norm

EMBEDDINGS = -1  # the state before layer 0, said as a post-layer index
NORMED_LAYERS = 3  # readings after the last norm are tried for so many of the last layers
PROBES = 32  # rows of a document that vote on its offset
SEPARATION_ROWS = 24


@dataclass(frozen=True, order=True)
class Reading:
    """The output of a decoder layer, `norms` times through the verifier's last norm."""

    layer: int
    norms: int = 0


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the stored states are said to be, and what the drafter will be served with.

    Attributes:
        aux_layers: post-layer indices, in the order of the aux slots.
        final_hidden: whether the final state went through the last norm.
        num_hidden_layers: of the verifier.
        codec: in which they were stored.
    """

    aux_layers: tuple[int, ...]
    final_hidden: Literal["pre_norm", "post_norm"]
    num_hidden_layers: int
    codec: Codec = "none"

    @property
    def readings(self) -> list[Reading]:
        """Of each stored tensor, the final one last."""
        final = Reading(self.num_hidden_layers - 1, int(self.final_hidden == "post_norm"))
        return [*(Reading(layer) for layer in self.aux_layers), final]

    @property
    def names(self) -> list[str]:
        """Of each stored tensor."""
        return [*(f"aux[{i}]" for i in range(len(self.aux_layers))), "final"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The verifier's last norm; `weight_H` with the family's offset in it."""

    weight_H: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight_H.float(), self.eps)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What an engine computed over the tokens of a document.

    Attributes:
        layers: post-layer indices, `EMBEDDINGS` for the state before layer 0. The last layer's is
            missing from an engine that captures it after the norm only; then a final state before
            the norm is not told by value, but still by the tokens it predicts (`final_check`).
        outputs_TLH: their outputs, residuals added.
        post_TH: the state that lm_head reads.
    """

    layers: tuple[int, ...]
    outputs_TLH: Tensor
    post_TH: Tensor


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One document's stored states against its reference.

    Attributes:
        tokens, rows: of the document, and how many rows are stored for them.
        offsets: per stored tensor, s where row t holds the state of token t + s.
        errors_SC: relative errors of every stored tensor under every reading, at its offset:
            medians over rows of |stored - reference| / |reference|.
        errors_declared: per stored tensor, its error as it is declared, without an offset.
        first_wrong, wrong_share: per stored tensor, how many rows at the start are nearer to
            another reading than to the best one, and which share of all rows is.
        separation_CC: median relative distances between readings.
        noise_C: medians over rows of what the engine differs by from itself.
        rounding: relative error of rounding the reference to the stored dtype, once.
        codec_C: medians over rows of the relative error that the codec adds to a reading.
    """

    id: str
    tokens: int
    rows: int
    readings: list[Reading]
    offsets: list[int]
    errors_SC: Tensor
    errors_declared: list[float]
    first_wrong: list[int]
    wrong_share: list[float]
    separation_CC: Tensor
    noise_C: Tensor
    rounding: float
    codec_C: Tensor


def measure(
    id: str,
    aux_RnH: Tensor,
    final_RH: Tensor,
    reference: Reference,
    again: Reference | None,
    declared: Declared,
    norm: Norm,
) -> Measured:
    """Compares one document under every reading and every offset.

    Args:
        reference: the engine's states of the document's T tokens. R may differ from T: that is one
            of the faults looked for.
        again: the same computed a second time; None leaves this document's noise at 0.
    """
    readings, states_CTH = _readings(reference, declared, norm)
    rows, tokens = len(final_RH), states_CTH.shape[1]
    sizes_CT = states_CTH.norm(dim=-1).clamp_min(1e-30)
    noise_C = torch.zeros(len(readings))
    if again is not None:
        _, other_CTH = _readings(again, declared, norm)
        noise_C = _relative(other_CTH, states_CTH, sizes_CT).median(dim=1).values
    apart = _separation(states_CTH)
    codec_C = rounding(states_CTH.flatten(0, 1), declared.codec).view_as(sizes_CT).median(1).values
    stored = [aux_RnH[:, i].float() for i in range(aux_RnH.shape[1])] + [final_RH.float()]
    offsets, errors, as_declared, first, share = [], [], [], [], []
    for x_RH, expected in zip(stored, declared.readings, strict=True):
        offset = _offset(x_RH, states_CTH, sizes_CT)
        errors_CM = _errors(x_RH, states_CTH, sizes_CT, offset)
        errors_C = errors_CM.median(dim=1).values
        best = int(errors_C.argmin())
        others = apart[best][apart[best] > 2 * errors_C[best]]
        halfway = 0.5 * float(others.min()) if len(others) else math.inf
        wrong = errors_CM[best] > with_codec(halfway, float(codec_C[best]))
        right = (~wrong).nonzero()[:, 0].tolist()
        e = readings.index(expected)
        plain_1M = _errors(x_RH, states_CTH[e : e + 1], sizes_CT[e : e + 1], 0)
        offsets.append(offset)
        errors.append(errors_C)
        as_declared.append(float(plain_1M.median()))
        first.append(right[0] if right else len(wrong))
        share.append(float(wrong.float().mean()))
    coarse = min((aux_RnH.dtype, reference.post_TH.dtype), key=lambda dtype: dtype.itemsize)
    return Measured(
        id=id,
        tokens=tokens,
        rows=rows,
        readings=readings,
        offsets=offsets,
        errors_SC=torch.stack(errors),
        errors_declared=as_declared,
        first_wrong=first,
        wrong_share=share,
        separation_CC=apart,
        noise_C=noise_C,
        rounding=_rounding(reference.post_TH, coarse),
        codec_C=codec_C,
    )


def _readings(reference: Reference, declared: Declared, norm: Norm) -> tuple[list[Reading], Tensor]:
    """Every reading with its states, float32 [C, T, H]."""
    last = declared.num_hidden_layers - 1
    readings = [Reading(layer) for layer in reference.layers]
    states = list(reference.outputs_TLH.float().unbind(1))
    normed = {
        layer: norm(plain_TH)
        for layer, plain_TH in zip(reference.layers, states, strict=True)
        if last - NORMED_LAYERS < layer < last and layer != EMBEDDINGS
    }
    for layer, once_TH in [*normed.items(), (last, reference.post_TH.float())]:
        readings += [Reading(layer, 1), Reading(layer, 2)]
        states += [once_TH, norm(once_TH)]
    return readings, torch.stack(states)


def _offset(x_RH: Tensor, states_CTH: Tensor, sizes_CT: Tensor) -> int:
    """The offset that most of some rows vote for: each for the nearest state of any reading."""
    rows, tokens = len(x_RH), states_CTH.shape[1]
    probes = torch.linspace(0, rows - 1, min(PROBES, rows)).round().long()
    x_PH = x_RH[probes]
    products_CPT = x_PH @ states_CTH.transpose(1, 2)
    squares_CT = sizes_CT.square()
    apart_CPT = x_PH.square().sum(-1)[:, None] + squares_CT[:, None] - 2 * products_CPT
    near_PK = (apart_CPT / squares_CT[:, None]).transpose(0, 1).flatten(1)
    offsets = (near_PK.argmin(dim=1) % tokens - probes).tolist()
    votes = Counter(offsets)
    return max(votes, key=lambda offset: (votes[offset], -abs(offset)))


def _errors(x_RH: Tensor, states_CTH: Tensor, sizes_CT: Tensor, offset: int) -> Tensor:
    """Relative errors [C, M] of the M rows that have a state at this offset."""
    start, end = max(0, -offset), min(len(x_RH), states_CTH.shape[1] - offset)
    where = slice(start + offset, end + offset)
    return _relative(x_RH[start:end], states_CTH[:, where], sizes_CT[:, where])


def _relative(x: Tensor, states_CTH: Tensor, sizes_CT: Tensor) -> Tensor:
    """Reading by reading, so that no difference of all of them is held at once."""
    pairs = zip(x if x.dim() == 3 else [x] * len(states_CTH), states_CTH, sizes_CT, strict=True)
    return torch.stack([(a - b).norm(dim=-1) / size for a, b, size in pairs])


def _separation(states_CTH: Tensor) -> Tensor:
    """Median over some rows of |c - d| / |c|, [C, C]."""
    tokens = states_CTH.shape[1]
    picked = torch.linspace(0, tokens - 1, min(SEPARATION_ROWS, tokens)).round().long()
    some_CTH = states_CTH[:, picked]
    sizes_CT = some_CTH.norm(dim=-1).clamp_min(1e-30)
    return torch.stack(
        [
            ((some_CTH - one_TH).norm(dim=-1) / size_T).median(dim=1).values
            for one_TH, size_T in zip(some_CTH, sizes_CT, strict=True)
        ]
    )


def _rounding(states_TH: Tensor, dtype: torch.dtype) -> float:
    """Median relative error of one rounding. Scaled first: what is already round would not err."""
    wide = states_TH.double() * math.sqrt(2)
    apart = (wide.to(dtype).double() - wide).norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-30)
    return float(apart.median())


def with_codec(error: float, codec: float) -> float:
    """An error and a codec's beside it."""
    return math.hypot(error, codec) if codec else error
