"""Noise on aux hidden states while training; targets stay clean.

Legend: T rows of a document, N packed rows, P aux layers, G verifier hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eagle3.dataset import Document
from eagle3.packing import Batch
from eagle3.seeding import generator
from eagle3.settings import Settings

SCALE_DOCUMENTS = 64


class NoiseSettings(Settings):
    """Noise on the aux states.

    uniform_abs: uniform in ±std whatever the state's size (what `--noise-std` means in existing
        training scripts; its real deviation is 0.58 std).
    gaussian_relative: normal, with std in units of each layer's median row RMS.
    """

    kind: Literal["none", "uniform_abs", "gaussian_relative"] = "none"
    std: float = Field(0.0, ge=0.0)


def layer_scales(documents: Sequence[Document]) -> Tensor:
    """Median row RMS of each aux layer over the first documents, float32 [P]."""
    rows = [documents[i].aux.float() for i in range(min(len(documents), SCALE_DOCUMENTS))]
    rms_NP = torch.cat(rows).square().mean(-1).sqrt()
    return rms_NP.median(dim=0).values


def add_noise(
    batch: Batch, settings: NoiseSettings, scales_P: Tensor | None, *, seed: int, epoch: int
) -> Tensor:
    """The batch's aux states with noise, [N, P, G].

    Each sample draws from a generator named by run seed, epoch and sample id, so that neither
    packing, nor the number of processes, nor a resumed run changes what it gets.
    """
    if settings.kind == "none" or settings.std == 0.0:
        return batch.aux_NPG
    out = torch.empty_like(batch.aux_NPG)
    for sample, (start, end) in zip(batch.ids, batch.spans, strict=True):
        draw = generator("noise", seed, epoch, sample)
        clean_TPG = batch.aux_NPG[start:end].float()
        noise = torch.empty_like(clean_TPG)
        if settings.kind == "uniform_abs":
            noise.uniform_(-settings.std, settings.std, generator=draw)
        else:
            if scales_P is None:
                raise ValueError("relative noise needs the layers' scales")
            noise.normal_(generator=draw).mul_(settings.std * scales_P[:, None])
        out[start:end] = clean_TPG + noise
    return out
