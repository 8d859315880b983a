"""The sibling: rounding by hand, and what of a verifier it changes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3.sibling import SiblingSettings, make_sibling, round_weight
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model


def test_rounding_by_hand() -> None:
    # Two bits on 0..3 keep four values as they are; a group of equal weights stays.
    exact = torch.tensor([[0.0, 1.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0]])
    assert torch.equal(round_weight(exact, bits=2, group=4), exact)
    # One bit: two values a group. For 0, 1, 0.4, 0.6 the upper one at 0.7 errs by 0.3, 0.3 and 0.1,
    # at 1 by 0.4 and 0.4, at 0.85 by 0.15, 0.4 (0.4 goes to 0) and 0.25. The last, shorter group
    # is rounded on its own.
    weight = torch.tensor([[0.0, 1.0, 0.4, 0.6, -2.0, 2.0]])
    expected = torch.tensor([[0.0, 0.7, 0.7, 0.7, -2.0, 2.0]])
    assert torch.allclose(round_weight(weight, bits=1, group=4), expected)


def test_rounding_has_few_values_a_group_and_a_small_error() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    rounded = round_weight(weight, bits=3, group=16)
    for row, new in zip(weight.view(-1, 16), rounded.view(-1, 16), strict=True):
        assert new.unique().numel() <= 8
        # Never worse than spacing the values over the whole range.
        step = (row.max() - row.min()) / 7
        plain = row.min() + ((row - row.min()) / step).round() * step
        assert (row - new).square().sum() <= (row - plain).square().sum() + 1e-6
    half = round_weight(weight.bfloat16(), bits=3, group=16)
    assert half.dtype == torch.bfloat16 and half.shape == weight.shape


def test_sibling_differs_in_linear_layers_only(tiny_verifier: Path, tmp_path: Path) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    settings = SiblingSettings(bits=3, group=32)
    name = make_sibling(spec, settings, tmp_path / "sibling")
    make_sibling(spec, settings, tmp_path / "again")
    sibling = VerifierSpec.open(tmp_path / "sibling")
    assert sibling.verifier == name == f"{spec.verifier}-rounded-3bit"
    assert (sibling.config_hash, sibling.hidden_size) == (spec.config_hash, spec.hidden_size)
    assert sibling.revision != spec.revision
    old = load_file(tiny_verifier / "model.safetensors")
    new = load_file(tmp_path / "sibling" / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert old.keys() == new.keys()
    for key in old:
        assert torch.equal(new[key], again[key])
        linear = "_proj." in key
        assert torch.equal(old[key], new[key]) != linear
        if linear:
            assert torch.equal(new[key], round_weight(old[key], 3, 32))
    tokens = torch.tensor([[5, 6, 7]])
    assert load_model(sibling, torch.float32, "cpu")(tokens).logits.isfinite().all()
