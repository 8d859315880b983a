"""Losses on the acceptance rate against plain autograd in float64, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle3 import loss_acceptance
from eagle3.loss import TargetHead
from eagle3.loss_acceptance import AcceptanceTargets, acceptance_loss
from eagle3.objective import ObjectiveSettings, objective
from eagle3.packing import supervised_rows
from tests.reference_ttt import document_logits
from tests.tiny_training import HIDDEN, RAGGED, VOCAB, make_batch, make_drafter, vocabulary_of

KINDS = ("tv", "lk_alpha", "lk_lambda")
ETA = 2.0


def plain_loss(kind: str, logits_RD: Tensor, p_RD: Tensor) -> Tensor:
    """Sum over rows as the papers write it; autograd does the rest. p is not renormalised."""
    q = logits_RD.softmax(-1)
    alpha = torch.minimum(p_RD, q).sum(-1)
    if kind == "tv":
        return (1 - alpha).sum()
    if kind == "lk_alpha":
        return -alpha.log().sum()
    renormalised = p_RD / p_RD.sum(-1, keepdim=True)
    divergence = (renormalised * (renormalised.log() - logits_RD.log_softmax(-1))).sum()
    share = math.exp(-ETA * alpha.mean().item())
    return share * divergence + (1 - share) * (1 - alpha).sum()


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_autograds(kind: str, trained_head: bool, monkeypatch) -> None:
    """Every step of the training-time test, packed ragged documents, several chunks of rows."""
    monkeypatch.setattr(loss_acceptance, "CHUNK_ROWS", 3)
    drafter, batch = make_drafter(), make_batch(*RAGGED)
    drafter.lm_head.weight.requires_grad_(trained_head)
    draw = torch.Generator().manual_seed(3)
    rows_VG = torch.randn(VOCAB, HIDDEN, generator=draw, dtype=torch.float64) * 0.5
    target_ids = vocabulary_of(drafter).target_ids
    full_NV = (batch.final_NG @ rows_VG.T).softmax(-1)
    batch.lse_N.copy_((batch.final_NG @ rows_VG.T).logsumexp(-1))
    head = TargetHead(rows_VG[target_ids], None, 1e-5, None)
    outcome = objective(
        drafter,
        batch,
        head,
        vocabulary_of(drafter),
        ObjectiveSettings(loss=kind, lk_eta=ETA, ttt_steps=3, step_decay=0.7),
        dtype=torch.float64,
        measure=True,
    )
    outcome.loss.backward()
    fast = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()

    losses = []
    documents = [
        document_logits(drafter, batch.token_ids_N[s:e], batch.aux_NPG[s:e], 3)
        for s, e in batch.spans
    ]
    for step in range(3):
        logits, targets = [], []
        for row in supervised_rows(batch, step).nonzero()[:, 0].tolist():
            document = int(batch.document_N[row])
            logits.append(documents[document][step][row - batch.spans[document][0]])
            targets.append(full_NV[row + 1 + step, target_ids])
        assert len(logits) == outcome.rows[step] > 3
        losses.append(plain_loss(kind, torch.stack(logits), torch.stack(targets)) / len(logits))
    for mine, theirs in zip(outcome.losses, losses, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=0)
    sum(0.7**k * loss for k, loss in enumerate(losses)).backward()
    slow = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert fast.keys() == slow.keys()
    assert ("lm_head.weight" in fast) == trained_head
    for name, gradient in slow.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(fast[name], gradient, rtol=1e-9, atol=1e-9 * scale, msg=name)


def one_row(kind: str, p: list[float], q: list[float]) -> tuple[float, float, list[float]]:
    """Loss, least loss and gradient in the logits of one row, given p and q on the vocabulary."""
    size = len(p)
    eye = torch.eye(size, dtype=torch.float64)
    x = torch.tensor([q], dtype=torch.float64).log().requires_grad_()
    lse = torch.zeros(1, dtype=torch.float64)  # log p are the logits: normalised over everything
    target = AcceptanceTargets(
        torch.tensor([p], dtype=torch.float64).log(), lse, TargetHead(eye, None, 1e-5, None),
        kind, ETA,
    )  # fmt: skip
    loss, least, best = acceptance_loss(x, eye, target, torch.zeros(1).long(), argmax=True)
    assert best is not None and best.tolist() == [q.index(max(q))]
    loss.backward()
    assert x.grad is not None
    return loss.item(), least.item(), x.grad[0].tolist()


def test_by_hand() -> None:
    # A quarter of p lies outside the draft vocabulary; alpha = 0.5 + 0.2 + 0 = 0.7. Renormalised,
    # p would be (2/3, 1/3, 0) and alpha 0.9333.
    p, q = [0.5, 0.25, 1e-300], [0.75, 0.2, 0.05]
    loss, least, gradient = one_row("tv", p, q)
    assert (loss, least) == (pytest.approx(0.3), pytest.approx(0.25))
    # Only the second token's q is below its p: d alpha = q (below - 0.2).
    assert gradient == pytest.approx([0.75 * 0.2, -0.2 * 0.8, 0.05 * 0.2])
    loss, least, gradient = one_row("lk_alpha", p, q)
    assert (loss, least) == (pytest.approx(-math.log(0.7)), pytest.approx(-math.log(0.75)))
    assert gradient == pytest.approx([0.15 / 0.7, -0.16 / 0.7, 0.01 / 0.7])
    loss, least, gradient = one_row("lk_lambda", p, q)
    share = math.exp(-ETA * 0.7)
    divergence = 2 / 3 * math.log(2 / 3 / 0.75) + 1 / 3 * math.log(1 / 3 / 0.2)
    assert loss == pytest.approx(share * divergence + (1 - share) * 0.3)
    assert least == pytest.approx((1 - share) * 0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_drafter_has_the_least_loss_and_no_slope(kind: str) -> None:
    loss, least, gradient = one_row(kind, [0.4, 0.2, 0.1], [4 / 7, 2 / 7, 1 / 7])
    assert loss == pytest.approx(least, rel=1e-12)
    assert gradient == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_follows_float64(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x, final = (torch.randn(700, 32, generator=draw, dtype=torch.float64) for _ in range(2))
    weight, head_rows = (
        torch.randn(300, 32, generator=draw, dtype=torch.float64) * 0.4 for _ in range(2)
    )
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        rows = x.to(dtype).detach().clone().requires_grad_()
        head = TargetHead(head_rows.to(dtype), None, 1e-5, None)
        lse = (final.to(dtype) @ head.rows_DG.T).to(torch.float64).logsumexp(-1) + 0.2
        loss, _, _ = acceptance_loss(
            rows, weight.to(dtype), AcceptanceTargets(final.to(dtype), lse, head, kind, ETA),
            torch.arange(700), argmax=False,
        )  # fmt: skip
        loss.backward()
        assert rows.grad is not None
        found.append((loss.item(), rows.grad.double()))
    (exact, exact_grad), (rough, rough_grad) = found
    assert rough == pytest.approx(exact, rel=5e-3)
    assert torch.nn.functional.cosine_similarity(
        rough_grad.flatten(), exact_grad.flatten(), dim=0
    ) > 0.995  # fmt: skip
