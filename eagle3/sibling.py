"""A sibling of a verifier: the same model with its linear layers rounded to a few bits.

Stands in for a related model on which a published drafter was trained. Knows nothing of serving
quantised models: the rounded weights are stored in the verifier's own dtype.

Shape suffixes: O outputs, I inputs, G groups, g weights a group.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.settings import Settings
from eagle3.verifier import VerifierSpec, verifier_files


class SiblingSettings(Settings):
    """How far the sibling lies from the verifier.

    Attributes:
        bits: of a rounded weight.
        group: neighbouring inputs that share a scale and an offset.
    """

    bits: int = Field(ge=1, le=8)
    group: int = Field(ge=1)


def round_weight(weight_OI: Tensor, bits: int, group: int) -> Tensor:
    """Rounds to 2^bits evenly spaced values between each group's least and greatest weight.

    Args:
        weight_OI: any float dtype; a last group shorter than the others is rounded on its own.

    Returns:
        same shape and dtype.
    """
    inputs = weight_OI.shape[1]
    whole = inputs - inputs % group
    parts = [weight_OI[:, :whole].float().unflatten(1, (-1, group))] if whole else []
    if whole < inputs:
        parts.append(weight_OI[:, None, whole:].float())
    rounded = []
    for part_OGg in parts:
        low = part_OGg.amin(-1, keepdim=True)
        step = (part_OGg.amax(-1, keepdim=True) - low) / (2**bits - 1)
        step = torch.where(step > 0, step, torch.ones_like(step))
        rounded.append((low + ((part_OGg - low) / step).round() * step).flatten(1))
    return torch.cat(rounded, dim=1).to(weight_OI.dtype)


def make_sibling(spec: VerifierSpec, settings: SiblingSettings, out: Path) -> str:
    """Writes the sibling's folder: linear layers of the decoder rounded, the rest as it is.

    Embeddings, norms and lm_head stay, so that verifier and sibling share their vocabulary's
    geometry as two trainings from one base do.

    Returns:
        its name.
    """
    out.mkdir(parents=True, exist_ok=True)
    for path in verifier_files(spec.source):
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            for name, tensor in tensors.items():
                if ".layers." in name and tensor.ndim == 2 and tensor.is_floating_point():
                    tensors[name] = round_weight(tensor, settings.bits, settings.group)
            save_file(tensors, out / path.name, {"format": "pt"})
        else:
            shutil.copyfile(path, out / path.name)
    name = f"{spec.verifier}-rounded-{settings.bits}bit"
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"_name_or_path": name}, indent=2) + "\n")
    return name
