"""Products in parts: the same sums as plain ones, whatever the shape asks for."""

from __future__ import annotations

import pytest
import torch

from eagle3.products import PART_ROWS, linear, product


@pytest.mark.parametrize("rows", [5, PART_ROWS, PART_ROWS + 1, 1023, 1600])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (96, 64), (2304, 32)])
def test_products_in_bfloat16_are_the_plain_ones(rows: int, inputs: int, outputs: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    # Small whole numbers: every product and sum is exact, in whatever order.
    x = torch.randint(-1, 2, (rows, inputs), generator=draw).double()
    weight = torch.zeros(outputs, inputs, dtype=torch.float64)
    weight[:, :40] = torch.randint(-1, 2, (outputs, 40), generator=draw)
    grad = torch.zeros(rows, outputs, dtype=torch.float64)
    grad[::16, :40] = torch.randint(-1, 2, grad[::16, :40].shape, generator=draw)
    x_narrow, weight_narrow = (t.bfloat16().requires_grad_() for t in (x, weight))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        out = linear(x_narrow, weight_narrow)
        out.backward(grad.bfloat16())
        assert torch.equal(product(x.bfloat16(), weight.T.bfloat16()), out)
    finally:
        torch.set_num_threads(threads)
    assert x_narrow.grad is not None and weight_narrow.grad is not None
    assert torch.equal(out.double(), x @ weight.T)
    assert torch.equal(x_narrow.grad.double(), grad @ weight)
    assert torch.equal(weight_narrow.grad.double(), grad.T @ x)
