"""Matrix products of a training step, in the forms in which oneDNN is fast on several threads.

Same sums as `functional.linear` and its backward pass; only how they are asked for differs. Off the
CPU, and in other dtypes than bfloat16, plain products.

Legend: R rows, O outputs of a linear layer, I inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# oneDNN computes a product with few columns on one thread alone once it has more rows than these,
# fewer where the sums are long, and up to about 1,500: 1.2 TFLOP/s on two AMX cores, where parts
# of the rows make 1.9 to 2.4.
NARROW, MOST_ROWS, PART_ROWS = 768, 1536, 544
LONG_SUM, LONG_PART_ROWS = 2048, 272


def product(a_RI: Tensor, b_IO: Tensor) -> Tensor:
    """a @ b, [R, O]."""
    rows, columns = len(a_RI), b_IO.shape[1]
    part = PART_ROWS if a_RI.shape[1] < LONG_SUM else LONG_PART_ROWS
    if not _slow_alone(a_RI) or columns > NARROW or not part < rows <= MOST_ROWS:
        return a_RI @ b_IO
    out_RO = a_RI.new_empty(rows, columns)
    parts = -(-rows // part)
    for a, out in zip(a_RI.chunk(parts), out_RO.chunk(parts), strict=True):
        torch.mm(a, b_IO, out=out)
    return out_RO


def linear(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """`functional.linear` without bias, differentiable."""
    out: Tensor = _Linear.apply(x_RI, weight_OI)
    return out


def _slow_alone(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and torch.get_num_threads() > 1


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
        return product(x_RI, weight_OI.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor]:
        x_RI, weight_OI = ctx.saved_tensors
        (grad_RO,) = grads
        grad_x = product(grad_RO, weight_OI) if ctx.needs_input_grad[0] else None
        if not _slow_alone(x_RI):
            return grad_x, grad_RO.T @ x_RI
        # A product that reads its left side down the columns is half as fast: rather copy the
        # narrower of the two once.
        if x_RI.shape[1] < grad_RO.shape[1]:
            return grad_x, (x_RI.T.contiguous() @ grad_RO).T
        return grad_x, grad_RO.T.contiguous() @ x_RI
