"""Linear layers with weights laid out once for a CPU's matrix units.

oneDNN rearranges a bfloat16 weight at every call of `functional.linear`; with one to a few rows
that costs as much as the product. Packed once, a decoding step of a small model takes about two
thirds of the time, and verifying a few rows costs hardly more than decoding one. In float32 one row
gets slower and a few rows faster. For inference only. Knows nothing of models beyond `nn.Linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU: x [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # A private operator, the one that torch's own compiler emits for a frozen linear layer.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 4)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out


def pack_linears(model: nn.Module) -> int:
    """Replaces the `nn.Linear` layers of a model by packed ones, in place; returns how many.

    Does nothing (and returns 0) off the CPU, for other dtypes than bfloat16 and float32, and in
    builds of torch without the operators. A weight shared with an embedding stays where the
    embedding has it.
    """
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (known and torch.backends.mkldnn.is_available()):
        return 0
    packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and _fits(child.weight):
                setattr(module, name, PackedLinear(child))
                packed += 1
    return packed


def _fits(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_bf16_units())


def _has_bf16_units() -> bool:
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check()) if check is not None else False
