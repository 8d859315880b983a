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
    _check_scale(scale, f"{where}: {name}")
    if weight.dtype in FP8:
        if scale is None:
            raise HarnessError(
                "a weight is stored in fp8 without its scale", where=f"{where}: {name}",
                rule=f"{name}_scale_inv or {name}_scale beside it", got=str(weight.dtype),
                fix=WHOLE,
            )  # fmt: skip
        return scaled_fp8(weight, scale, _block(settings, where), where=f"{where}: {name}").to(
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
    if wide.dim() != 2:
        raise HarnessError(
            "an fp8 vector with more scales than one", where=where, rule="one scale",
            got=list(scale.shape), fix=WHOLE,
        )  # fmt: skip
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
    where = f"{where}: {name}"
    packed_OP, scale_OG = parts["weight_packed"], parts.get("weight_scale")
    unknown = sorted(set(parts) - {"weight_packed", "weight_scale", "weight_shape"})
    bits = _bits(settings)
    if unknown or bits not in (4, 8) or packed_OP.dtype != torch.int32 or packed_OP.dim() != 2:
        raise HarnessError(
            "a weight is packed in a way that is not understood here", where=where,
            rule="symmetric integers of 4 or 8 bits in words of 32, groups of neighbours",
            got=f"{bits!r} bits in {packed_OP.dtype}, "
            f"further parts: {', '.join(unknown) or 'none'}",
            fix=UNQUANTISED,
        )  # fmt: skip
    if scale_OG is None:
        raise HarnessError(
            "a weight is packed without its scale", where=where,
            rule=f"{name}_scale beside it", got=f"parts {', '.join(sorted(parts))}", fix=WHOLE,
        )  # fmt: skip
    _check_scale(scale_OG, where)
    shape = parts["weight_shape"].tolist() if "weight_shape" in parts else None
    if shape is None:
        shape = [len(packed_OP), packed_OP.shape[1] * (WORD_BITS // bits)]
    whole = len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
    rows, columns = shape if whole else (0, 0)
    words = math.ceil(columns * bits / WORD_BITS)
    group = _group_size(settings) or columns  # without groups: a scale for each row
    scales = [rows, math.ceil(columns / max(group, 1))]
    if not whole or list(packed_OP.shape) != [rows, words] or list(scale_OG.shape) != scales:
        raise HarnessError(
            "the parts of a packed weight do not fit each other", where=where,
            rule=f"words [{rows}, {words}] of {bits} bits each and scales {scales}, for shape "
            f"{shape} in groups of {group}",
            got=f"words {list(packed_OP.shape)} and scales {list(scale_OG.shape)}",
            fix=WHOLE,
        )  # fmt: skip
    scale_OI = scale_OG.float().repeat_interleave(group, 1)[:, :columns]
    return unpack(packed_OP, bits, columns) * scale_OI


def _check_scale(scale: Tensor | None, where: object) -> None:
    """Refuses scales that are bit patterns (exponents alone, as MX formats have) or no numbers."""
    if scale is not None and not scale.is_floating_point():
        raise HarnessError(
            "the scales of a quantised weight are no floating point numbers", where=where,
            rule="a scale to multiply with", got=scale.dtype, fix=UNQUANTISED,
        )  # fmt: skip
    if scale is not None and not bool(scale.float().isfinite().all()):
        raise HarnessError(
            "the scales of a quantised weight hold a NaN or infinity", where=where,
            rule="finite numbers", got=f"others, in {scale.dtype}", fix=WHOLE,
        )  # fmt: skip


def _schemes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of weights, group by group."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        return []
    parts = (group.get("weights") for group in groups.values() if isinstance(group, Mapping))
    return [weights for weights in parts if isinstance(weights, Mapping)]


def _bits(settings: Mapping[str, Any]) -> int | None:
    found = [scheme.get("num_bits") for scheme in _schemes(settings)]
    return found[0] if found and all(one == found[0] for one in found) else None


def _group_size(settings: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale; None for all of a row."""
    sizes = [scheme.get("group_size") for scheme in _schemes(settings)]
    size = sizes[0] if sizes and all(one == sizes[0] for one in sizes) else None
    return size if type(size) is int and size > 0 else None


def _block(settings: Mapping[str, Any], where: object) -> Sequence[int]:
    own = [
        scheme["block_structure"] for scheme in _schemes(settings) if scheme.get("block_structure")
    ]
    block = settings.get("weight_block_size") or (own[0] if own else DEFAULT_BLOCK)
    sizes = isinstance(block, list | tuple) and len(block) == 2
    if not sizes or not all(type(size) is int and size > 0 for size in block):
        raise HarnessError(
            "the blocks of a quantised checkpoint cannot be used",
            where=f"{where}: weight_block_size in its quantization_config",
            rule="two whole numbers above 0", got=repr(block), fix="correct its config.json",
        )  # fmt: skip
    return block
