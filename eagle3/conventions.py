"""What hidden states of other programs do not say of themselves: asked for, or read off the data.

A wrong belief here trains against wrong targets without any error. So nothing is assumed. Whether
the final state went through the last norm is told by its values (`eagle3.last_norm`); what the loss
mask is aligned to, by where the chat template's opening of an answer stands
(`eagle3.mask_alignment`). Which layers the aux states come from has to be said.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.formats.foreign_samples import RawSample, refuse_not_finite
from eagle3.formats.foreign_states import ForeignFolder
from eagle3.last_norm import NormState, find_norm
from eagle3.mask_alignment import Alignment, find_alignment
from eagle3.settings import Settings
from eagle3.verifier_head import VerifierHead

log = logging.getLogger(__name__)

PROBED_SAMPLES = 32


class Conventions(Settings):
    """What people say of a folder; None is to be found, or asked for.

    aux_layers: post-layer indices in stored order (k: the output of decoder layer k).
    final_hidden: whether the final state went through the verifier's last norm.
    mask_alignment: "token": the mask marks answer tokens; "prediction": the rows that predict one.
    padding_rows: rows at either end whose states are all zero: refuse such a sample, or drop them.
    """

    aux_layers: list[int] | None = None
    final_hidden: NormState | None = None
    mask_alignment: Alignment | None = None
    padding_rows: Literal["refuse", "drop"] = "refuse"


@dataclass(frozen=True)
class Settled:
    """The same with nothing left open."""

    aux_layers: tuple[int, ...]
    final_hidden: NormState
    mask_alignment: Alignment
    padding_rows: Literal["refuse", "drop"]


def settle(
    folder: ForeignFolder,
    head: VerifierHead,
    said: Conventions,
    opening: Sequence[int] | None,
    why_not: str = "",
) -> Settled:
    """Finds what was not said, checks what was, and logs both with their evidence.

    Args:
        opening: token ids with which the chat template opens an answer; None where the verifier's
            tokenizer is not at hand.
        why_not: why it is not.

    Raises:
        HarnessError: something has to be said, or the data deny what was said.
    """
    layers = check_layers(folder, said, folder.read(0), head)
    count = min(PROBED_SAMPLES, len(folder.paths))
    stride = max(1, len(folder.paths) // count)
    samples = [folder.read(index * stride) for index in range(count)]
    for index, sample in enumerate(samples):
        refuse_not_finite(sample, folder.paths[index * stride])
    alignment = find_alignment(
        samples, said.mask_alignment, opening, head.config.eos_token_ids, folder, why_not
    )
    masks = [token_mask(sample.loss_mask, alignment) for sample in samples]
    norm = find_norm(samples, masks, head, said.final_hidden, folder)
    return Settled(layers, norm, alignment, said.padding_rows)


def check_layers(
    folder: ForeignFolder, said: Conventions, sample: RawSample, head: VerifierHead
) -> tuple[int, ...]:
    """The layers that were named, checked against data and verifier."""
    hidden, aux = sample.final.shape[-1], len(sample.aux)
    if hidden != head.config.hidden_size:
        raise HarnessError(
            "hidden states of another verifier", where=folder.folder,
            rule=f"hidden size {head.config.hidden_size}, of {head.config.verifier}", got=hidden,
            fix="the verifier of this data, or data of this verifier",
        )  # fmt: skip
    layers = said.aux_layers
    count = head.config.num_hidden_layers
    if layers is None:
        raise HarnessError(
            "the data does not say which layers its aux states come from, and counting differs by "
            "one between engines",
            where=folder.folder,
            rule=f"{aux} post-layer indices, k for the output of decoder layer k of 0 to "
            f"{count - 1}",
            got=folder.says,
            fix="--aux-layers with the layers that the data was extracted with",
        )
    if len(layers) != aux or len(set(layers)) != aux or not all(0 <= k < count for k in layers):
        raise HarnessError(
            "the layers named do not fit the data or the verifier",
            where=f"--aux-layers, {folder.folder}",
            rule=f"{aux} different layers of 0 to {count - 1}", got=layers,
            fix="name one layer for each aux state of a sample, in stored order",
        )  # fmt: skip
    log.info("aux states: outputs of layers %s, as said (%s)", layers, folder.says)
    return tuple(layers)


def token_mask(stored: Tensor, alignment: Alignment) -> Tensor:
    """bool [T]: the token is one that the verifier answered."""
    mask = stored.bool()
    if alignment == "token":
        return mask
    return torch.cat([torch.zeros_like(mask[:1]), mask[:-1]])
