"""States in 8 bits, against the format written out by hand."""

from __future__ import annotations

import pytest
import torch

from eagle3.codec import CHUNK_ROWS, LARGEST, decode, encode, rounding, stored


def e4m3() -> torch.Tensor:
    """Every finite magnitude of float8_e4m3fn: a sign, 4 bits of exponent with bias 7, 3 of
    mantissa; all ones is NaN."""
    numbers = [
        (m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    ]
    return torch.tensor(numbers, dtype=torch.float64)


def by_hand(states: torch.Tensor) -> torch.Tensor:
    """The nearest value of the format to each number over its row's scale, times the scale."""
    scales = (states.float().abs().amax(-1, keepdim=True) / 448).double()
    ratios = states.double() / scales
    places = (ratios.abs().unsqueeze(-1) - e4m3()).abs().argmin(-1)
    return e4m3()[places] * ratios.sign() * scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_by_hand(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    states = torch.randn(CHUNK_ROWS + 5, 3, 64, generator=rng).to(dtype)
    states[7] *= 100
    before = states.clone()
    values, scales = encode(states)
    assert values.dtype == torch.float8_e4m3fn and values.shape == states.shape
    assert scales.dtype == torch.float32 and scales.shape == states.shape[:-1]
    assert torch.equal(states, before)  # what is stored is computed with afterwards
    found = decode(values, scales, torch.float32)
    expected = by_hand(states)
    # Ratios in float32 can fall to the other side of a tie: an error as large, and rare.
    ties = ~torch.isclose(found.double(), expected, rtol=1e-6, atol=0)
    assert ties.float().mean() < 1e-2
    error = (found.double() - states.double()).abs()
    torch.testing.assert_close(
        error[ties], (expected - states.double()).abs()[ties], rtol=1e-3, atol=0
    )
    assert bool((error <= bound(states.double(), scales.double())).all())
    again = decode(values, scales, dtype)
    assert again.dtype == dtype and torch.equal(again, found.to(dtype))


def bound(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Half a unit in the last place: 2**-4 of a number, 2**-10 of the scale of the smallest."""
    return torch.maximum(states.abs() * 2**-4, scales.unsqueeze(-1) * 2**-10) * (1 + 1e-5)


def test_a_row_loses_three_percent_of_its_length() -> None:
    states = torch.randn(200, 3, 256, generator=torch.Generator().manual_seed(2))
    error = rounding(states, "fp8")
    assert error.shape == (200, 3) and 0.02 < float(error.median()) < 0.03
    assert float(error.max()) < 2**-4
    assert not rounding(states, "none").any()


def test_odd_rows() -> None:
    states = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    states[0] = 0
    states[1, 3] = 19968.0  # an outlier: the others keep an absolute error of its scale
    states[2] = torch.finfo(torch.bfloat16).max
    states[3] = 1e-38
    states[4] = 1e-41  # its scale is one or two steps above zero
    states[4, 2] = 2e-43
    values, scales = encode(states)
    found = decode(values, scales, torch.bfloat16)
    assert bool(found.isfinite().all())
    assert float(scales[0]) == 0 and not found[0].any()
    assert float(found[1, 3]) == 19968.0
    error = (found[1].double() - states[1].double()).abs()
    assert float(error.max()) <= 19968 / LARGEST * 2**-10 * 1.01 + 2**-8 * 3
    assert torch.equal(found[2], states[2])
    torch.testing.assert_close(found[3], states[3], rtol=2**-7, atol=0)
    # A row costs its neighbours nothing.
    assert torch.equal(decode(*encode(states[5:]), torch.bfloat16), found[5:])


def test_encoding_again_changes_nothing() -> None:
    states = torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    once = decode(*encode(states), torch.bfloat16)
    assert torch.equal(decode(*encode(once), torch.bfloat16), once)


def test_only_states_are_encoded() -> None:
    rows = {
        "token_ids": torch.arange(3), "loss_mask": torch.ones(3), "aux": torch.randn(3, 2, 4),
        "final": torch.randn(3, 4), "verifier_top1": torch.arange(3), "verifier_lse": torch.ones(3),
    }  # fmt: skip
    assert all(found is rows[name] for name, found in stored(rows, "none").items())
    found = stored(rows, "fp8")
    assert found.keys() == rows.keys() | {"aux_scale", "final_scale"}
    assert all(found[name] is rows[name] for name in rows.keys() - {"aux", "final"})
