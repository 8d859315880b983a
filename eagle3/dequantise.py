"""Weights of a quantised checkpoint as plain floats, matrix by matrix.

Two kinds are understood: packed integers with a scale a group (compressed-tensors'
`pack-quantized`, as Kimi-K2.5's experts) and fp8 with a scale a tensor, a row or a block
(DeepSeek-V3's `weight_scale_inv`, compressed-tensors' `weight_scale`). Knows parts and settings of
one matrix; which parts belong together is `eagle3.weight_keys`' to say.

Shape suffixes: O outputs, I inputs, P packed inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import HarnessError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DEFAULT_BLOCK = (128, 128)  # DeepSeek-V3's, where a configuration says nothing
WORD_BITS = 32
WHOLE = "download or save the checkpoint again, whole"
UNQUANTISED = "take the checkpoint before it was quantised for embed, norm and lm_head"


def dequantise(
    name: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any], *, where: object
) -> Tensor:
    """One weight from its stored parts.

    Args:
        name: of the weight, for errors.
        parts: by the last part of their stored names: `weight` alone is returned as it is.
        settings: the checkpoint's `quantization_config`; {} where it has none.

    Returns:
        The stored tensor, or bfloat16 where it was quantised.

    Raises:
        HarnessError: quantised in a way that is not understood, or parts that do not fit.
    """
    if "weight_packed" in parts:
        return _unpacked(name, parts, settings, where).to(torch.bfloat16)
    weight = parts["weight"]
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if weight.dtype in FP8:
        if scale is None:
            raise HarnessError(
                "a weight is stored in fp8 without its scale", where=f"{where}: {name}",
                rule=f"{name}_scale_inv or {name}_scale beside it", got=str(weight.dtype),
                fix=WHOLE,
            )  # fmt: skip
        return scaled_fp8(weight, scale, _block(settings), where=f"{where}: {name}").to(
            torch.bfloat16
        )
    if not weight.is_floating_point() or scale is not None:
        raise HarnessError(
            "a weight is quantised in a way that is not understood here", where=f"{where}: {name}",
            rule="plain floats, compressed-tensors pack-quantized, or fp8 with scales",
            got=f"{weight.dtype}, parts {', '.join(sorted(parts))}",
            fix=UNQUANTISED,
        )  # fmt: skip
    return weight


def scaled_fp8(weight_OI: Tensor, scale: Tensor, block: Sequence[int], *, where: object) -> Tensor:
    """fp8 times its scale, float32 [O, I].

    Args:
        scale: one number, one a row ([O] or [O, 1]), or one a block: [O/b0, I/b1], rounded up.
    """
    wide, scale = weight_OI.float(), scale.float()
    if scale.numel() == 1:
        return wide * scale.reshape(())
    rows, columns = wide.shape
    if scale.shape in ((rows,), (rows, 1)):
        return wide * scale.reshape(rows, 1)
    blocks = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if tuple(scale.shape) != blocks:
        raise HarnessError(
            "the scales of an fp8 weight do not fit it",
            where=where,
            rule=f"[{blocks[0]}, {blocks[1]}], a scale for {block[0]} x {block[1]} weights",
            got=list(scale.shape),
            fix="correct weight_block_size in its quantization_config, or download it again, whole",
        )
    scale = scale.repeat_interleave(block[0], 0)[:rows]
    return wide * scale.repeat_interleave(block[1], 1)[:, :columns]


def unpack(packed_OP: Tensor, bits: int, columns: int) -> Tensor:
    """Signed integers out of 32-bit words, lowest bits first, int32 [O, I].

    compressed-tensors stores q + 2^(bits-1), so that words hold no signs.
    """
    shifts = torch.arange(0, WORD_BITS - bits + 1, bits, dtype=torch.int32)
    values = (packed_OP[:, :, None] >> shifts) & (2**bits - 1)
    return values.flatten(1)[:, :columns] - 2 ** (bits - 1)


def _unpacked(
    name: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any], where: object
) -> Tensor:
    packed_OP, scale_OG = parts["weight_packed"], parts["weight_scale"].float()
    unknown = sorted(set(parts) - {"weight_packed", "weight_scale", "weight_shape"})
    bits = _bits(settings)
    if unknown or bits is None or WORD_BITS % bits:
        raise HarnessError(
            "a weight is packed in a way that is not understood here", where=f"{where}: {name}",
            rule="symmetric integers of 4 or 8 bits, groups of neighbours",
            got=f"{bits} bits, further parts: {', '.join(unknown) or 'none'}",
            fix=UNQUANTISED,
        )  # fmt: skip
    if "weight_shape" in parts:
        rows, columns = parts["weight_shape"].tolist()
    else:
        rows, columns = len(packed_OP), packed_OP.shape[1] * (WORD_BITS // bits)
    words = math.ceil(columns * bits / WORD_BITS)
    if tuple(packed_OP.shape) != (rows, words) or len(scale_OG) != rows:
        raise HarnessError(
            "the parts of a packed weight do not fit each other", where=f"{where}: {name}",
            rule=f"words [{rows}, {words}] of {bits} bits each and scales [{rows}, groups]",
            got=f"{list(packed_OP.shape)} and {list(scale_OG.shape)}",
            fix=WHOLE,
        )  # fmt: skip
    group = math.ceil(columns / scale_OG.shape[1])
    scale_OI = scale_OG.repeat_interleave(group, 1)[:, :columns]
    return unpack(packed_OP, bits, columns) * scale_OI


def _schemes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of weights, group by group."""
    groups = settings.get("config_groups") or {}
    return [group["weights"] for group in groups.values() if group.get("weights")]


def _bits(settings: Mapping[str, Any]) -> int | None:
    found = {scheme.get("num_bits") for scheme in _schemes(settings)}
    return found.pop() if len(found) == 1 else None


def _block(settings: Mapping[str, Any]) -> Sequence[int]:
    own = [
        scheme["block_structure"] for scheme in _schemes(settings) if scheme.get("block_structure")
    ]
    return settings.get("weight_block_size") or (own[0] if own else DEFAULT_BLOCK)
