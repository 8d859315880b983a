"""Are stored states the ones that serving will see? Compared by value, under every reading.

A stored tensor is declared to be one thing (the output of layer 14, row t at token t; the last
state after the last norm). Here it is held against what an engine computes for the same tokens: the
output of every layer, before and after the last norm, at every row. What it comes nearest to is
what it is. `eagle3.parity_faults` puts the differences into words.

How near is near enough is measured. Noise is what the engine itself differs by when it computes a
document a second time in other company, and at least what rounding the stored numbers once for each
addition to the residual stream does. Separation is how far the nearest other reading lies. Their
geometric mean is the tolerance: on a scale of ratios, what lies below it is nearer to noise than to
any other reading. What a codec of stored states rounded away is added in squares: it lies across
any difference between readings, so that a reading at a distance d still shows.

Pure functions; knows no engine and no files.

Legend: T tokens of a document, R its stored rows, n aux layers, H hidden size, L reference layers,
C readings, S stored tensors (n aux and the final one), P probed rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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
CODEC_SPREAD = 0.25  # by how much of itself a codec's error may differ from the one foreseen


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
        wrong = errors_CM[best] > _with(halfway, float(codec_C[best]))
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


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What one stored tensor is, over all documents.

    Attributes:
        declared, found: what it is said to be and what it comes nearest to.
        error, error_declared: medians over documents of the relative error under both.
        tolerance, noise, separation: of the reading found; see the module.
        tolerance_declared: of the declared one.
        offsets: by document: s where row t holds the state of token t + s.
    """

    name: str
    declared: Reading
    found: Reading
    error: float
    error_declared: float
    tolerance: float
    tolerance_declared: float
    noise: float
    separation: float
    offsets: tuple[int, ...]

    @property
    def known(self) -> bool:
        """A reading explains it."""
        return self.error <= self.tolerance

    @property
    def right(self) -> bool:
        """It is what it is said to be, row by row."""
        return self.error_declared <= self.tolerance_declared


def judge(documents: Sequence[Measured], declared: Declared) -> list[Slot]:
    """One finding for each stored tensor, the final one last.

    Raises:
        ValueError: no document.
    """
    if not documents:
        raise ValueError("no document was measured")
    readings = documents[0].readings
    noise_C = torch.stack([item.noise_C for item in documents]).max(dim=0).values
    coarse = max(item.rounding for item in documents)
    codec_C = torch.stack([item.codec_C for item in documents]).max(dim=0).values
    floor = [
        _noise(reading, float(noise_C[c]), coarse, float(codec_C[c]))
        for c, reading in enumerate(readings)
    ]
    apart_CC = _median([item.separation_CC for item in documents])
    slots = []
    for s, (name, expected) in enumerate(zip(declared.names, declared.readings, strict=True)):
        errors_C = _median([item.errors_SC[s] for item in documents])
        best = int(errors_C.argmin())
        plain = readings.index(expected)
        # Of readings that cannot be told apart, the declared one is meant.
        if errors_C[plain] <= errors_C[best] + floor[plain]:
            best = plain
        found = _tolerance(best, floor, codec_C, apart_CC)
        slots.append(
            Slot(
                name=name,
                declared=expected,
                found=readings[best],
                error=float(errors_C[best]),
                error_declared=sorted(item.errors_declared[s] for item in documents)[
                    len(documents) // 2
                ],
                tolerance=found[0],
                tolerance_declared=_tolerance(plain, floor, codec_C, apart_CC)[0],
                noise=found[1],
                separation=found[2],
                offsets=tuple(item.offsets[s] for item in documents),
            )
        )
    return slots


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


def _noise(reading: Reading, measured: float, coarse: float, codec: float) -> float:
    """What two right states differ by: as measured, at least a random walk of the roundings at the
    two additions of each layer below and at storing; and what is not known of a codec's error."""
    walk = coarse * math.sqrt(2 * (reading.layer + 1) + 1)
    return _with(max(measured, walk), CODEC_SPREAD * codec)


def _tolerance(
    c: int, floor_C: Sequence[float], codec_C: Tensor, apart_CC: Tensor
) -> tuple[float, float, float]:
    """Tolerance of reading c, its noise, and the distance to the nearest one that differs."""
    noise, codec = floor_C[c], float(codec_C[c])
    others = apart_CC[c][apart_CC[c] > 2 * noise]
    separation = float(others.min()) if len(others) else 1.0
    return _with(math.sqrt(noise * separation), codec), _with(noise, codec), separation


def _with(error: float, codec: float) -> float:
    """An error and a codec's beside it."""
    return math.hypot(error, codec) if codec else error


def _median(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).median(dim=0).values
