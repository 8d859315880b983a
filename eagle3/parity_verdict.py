"""What each stored tensor is, of all documents measured, and how near is near enough.

That is measured too. Noise is what the engine itself differs by when it computes a document a
second time in other company, and at least what rounding the stored numbers once for each addition
to the residual stream does. Separation is how far the nearest other reading lies. Their geometric
mean is the tolerance: on a scale of ratios, what lies below it is nearer to noise than to any other
reading. What a codec of stored states rounded away is added in squares: it lies across any
difference between readings, so that a reading at a distance d still shows.

Legend: C readings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.parity import Declared, Measured, Reading, with_codec

CODEC_SPREAD = 0.25  # by how much of itself a codec's error may differ from the one foreseen


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


def _noise(reading: Reading, measured: float, coarse: float, codec: float) -> float:
    """What two right states differ by: as measured, at least a random walk of the roundings at the
    two additions of each layer below and at storing; and what is not known of a codec's error."""
    walk = coarse * math.sqrt(2 * (reading.layer + 1) + 1)
    return with_codec(max(measured, walk), CODEC_SPREAD * codec)


def _tolerance(
    c: int, floor_C: Sequence[float], codec_C: Tensor, apart_CC: Tensor
) -> tuple[float, float, float]:
    """Tolerance of reading c, its noise, and the distance to the nearest one that differs."""
    noise, codec = floor_C[c], float(codec_C[c])
    others = apart_CC[c][apart_CC[c] > 2 * noise]
    separation = float(others.min()) if len(others) else 1.0
    return with_codec(math.sqrt(noise * separation), codec), with_codec(noise, codec), separation


def _median(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).median(dim=0).values
