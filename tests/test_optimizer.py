"""Which weights each optimizer updates, by how much, and that both repeat and resume to the bit."""

from __future__ import annotations

import pytest
import torch

from eagle3.optimizer import Optimizer, OptimizerName


def weights() -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "fc.weight": (6, 18),
        "midlayer.mlp.up_proj.weight": (24, 6),
        "norm.weight": (6,),
        "lm_head.weight": (12, 6),
    }
    return {n: torch.nn.Parameter(torch.randn(s, generator=draw)) for n, s in shapes.items()}


def gradients(trained: dict[str, torch.nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in trained.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def test_muon_makes_the_matrices_gradient_orthogonal() -> None:
    """One step from rest: the gradient's singular vectors with singular values near one (a few
    iterations leave them between 0.6 and 1.3), times 0.2 sqrt(longer side) and the rate."""
    trained = weights()
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    gradients(trained, 0)
    directions = {name: p.grad.double() for name, p in trained.items() if p.grad is not None}
    Optimizer("muon", trained, beta2=0.95, weight_decay=0.0).step(0.01)
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight"):
        shape = trained[name].shape
        step = (before[name] - trained[name].detach()).double() / (0.01 * 0.2 * max(shape) ** 0.5)
        u, _, vh = torch.linalg.svd(directions[name], full_matrices=False)
        values = u.T @ step @ vh.T
        assert ((values.diagonal() > 0.6) & (values.diagonal() < 1.3)).all(), values
        assert (values - values.diagonal().diag()).abs().max() < 0.05
    for name in ("norm.weight", "lm_head.weight"):  # AdamW's first step is the gradient's sign
        step = (before[name] - trained[name].detach()) / 0.01
        torch.testing.assert_close(step, directions[name].sign().float(), rtol=1e-3, atol=1e-3)


def test_adamw_is_torchs() -> None:
    ours, theirs = weights(), weights()
    optimizer = Optimizer("adamw", ours, beta2=0.9, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.9), weight_decay=0.1)
    for seed, rate in enumerate((0.01, 0.02, 0.005)):
        gradients(ours, seed)
        gradients(theirs, seed)
        optimizer.step(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        assert all(parameter.grad is None for parameter in ours.values())
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_restored_it_goes_on_with_the_same_bits(name: OptimizerName) -> None:
    whole, torn = weights(), weights()
    settings = {"beta2": 0.95, "weight_decay": 0.01}
    first, killed = Optimizer(name, whole, **settings), Optimizer(name, torn, **settings)
    for optimizer, trained in ((first, whole), (killed, torn)):
        gradients(trained, 1)
        optimizer.step(0.02)
    moments = {key: value.clone() for key, value in killed.moments().items()}
    assert len(moments) == {"adamw": 3 * 4, "muon": 2 + 3 * 2}[name]
    second = Optimizer(name, torn, **settings)
    second.restore(moments)
    for optimizer, trained in ((first, whole), (second, torn)):
        gradients(trained, 2)
        optimizer.step(0.01)
    for key, parameter in whole.items():
        assert torch.equal(parameter, torn[key])
