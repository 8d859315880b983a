"""A sibling of a verifier: the same model with its linear layers rounded to a few bits.

Stands in for a related model on which a published drafter was trained. Knows nothing of serving
quantised models: the rounded weights are stored in the verifier's own dtype.

Shape suffixes: O outputs, I inputs, G groups, g weights a group.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.settings import Settings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_files import verifier_files


class SiblingSettings(Settings):
    """How far the sibling lies from the verifier.

    Attributes:
        bits: of a rounded weight.
        group: neighbouring inputs that share a scale and an offset.
    """

    bits: int = Field(ge=1, le=8)
    group: int = Field(ge=1)


# Ends of a group's range, as shares of its least and greatest weight. At few bits an outlier that
# is cut off costs less than the coarse steps it would impose on its group.
CLIPS = (1.0, 0.85, 0.7)


def round_weight(weight_OI: Tensor, bits: int, group: int) -> Tensor:
    """Rounds each group of neighbouring inputs to 2^bits evenly spaced values.

    The values reach from the group's least to its greatest weight, or less far at either end
    (`CLIPS`) where that makes the sum of squared errors smaller.

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
    rounded = [_round_groups(part_OGg, 2**bits - 1).flatten(1) for part_OGg in parts]
    return torch.cat(rounded, dim=1).to(weight_OI.dtype)


def _round_groups(weight_OGg: Tensor, steps: int) -> Tensor:
    best_OGg = error_OG1 = None
    for low_share, high_share in itertools.product(CLIPS, CLIPS):
        low_OG1 = weight_OGg.amin(-1, keepdim=True) * low_share
        step_OG1 = (weight_OGg.amax(-1, keepdim=True) * high_share - low_OG1) / steps
        # A group of one value has no range to divide; a clipped one of one sign may have none.
        step_OG1 = torch.where(step_OG1 > 0, step_OG1, torch.ones_like(step_OG1))
        level_OGg = ((weight_OGg - low_OG1) / step_OG1).round().clamp(0, steps)
        new_OGg = low_OG1 + level_OGg * step_OG1
        new_error_OG1 = (new_OGg - weight_OGg).square().sum(-1, keepdim=True)
        if best_OGg is None or error_OG1 is None:
            best_OGg, error_OG1 = new_OGg, new_error_OG1
        else:
            better_OG1 = new_error_OG1 < error_OG1
            best_OGg = torch.where(better_OG1, new_OGg, best_OGg)
            error_OG1 = torch.where(better_OG1, new_error_OG1, error_OG1)
    assert best_OGg is not None
    return best_OGg


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
