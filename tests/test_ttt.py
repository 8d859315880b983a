"""The fast TTT objective against the plain reference, in float64."""

from __future__ import annotations

import pytest
import torch

from eagle3 import attention
from eagle3.drafter import DraftCache
from eagle3.loss import TargetHead
from eagle3.objective import ObjectiveSettings, objective
from eagle3.packing import measured_rows, supervised_rows
from tests.reference_ttt import document_logits, reference_losses
from tests.tiny_training import (
    DRAFT,
    HIDDEN,
    RAGGED,
    make_batch,
    make_drafter,
    vocabulary_of,
)

FULL = ([6, 7], [[1] * 6, [1] * 7])


@pytest.mark.parametrize("flash_rows", [7, 256])  # documents with and without the flash backward
@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("lengths_masks", [RAGGED, FULL])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_loss_and_gradients_are_the_reference(
    steps, lengths_masks, trained_head, flash_rows, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "FLASH_ROWS", flash_rows)
    drafter, batch = make_drafter(), make_batch(*lengths_masks)
    drafter.lm_head.weight.requires_grad_(trained_head)
    head = TargetHead(torch.randn(DRAFT, HIDDEN, dtype=torch.float64), None, 1e-5, None)
    outcome = objective(
        drafter,
        batch,
        head,
        vocabulary_of(drafter),
        ObjectiveSettings(ttt_steps=steps, step_decay=0.8),
        dtype=torch.float64,
        measure=False,
    )
    outcome.loss.backward()
    fast = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    losses, counts = reference_losses(drafter, batch, head, steps)
    assert outcome.rows == counts
    for mine, theirs in zip(outcome.losses, losses, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-12)
    sum(0.8**k * loss for k, loss in enumerate(losses)).backward()
    slow = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert fast.keys() == slow.keys()
    assert ("lm_head.weight" in fast) == trained_head
    for name, gradient in slow.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(fast[name], gradient, rtol=1e-9, atol=1e-9 * scale, msg=name)


@pytest.mark.parametrize(
    "switch", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
def test_each_switch_is_the_reference(switch: str) -> None:
    drafter, batch = make_drafter(**{switch: True}), make_batch(*RAGGED)
    head = TargetHead(torch.randn(DRAFT, HIDDEN, dtype=torch.float64), None, 1e-5, None)
    settings = ObjectiveSettings(ttt_steps=3)
    outcome = objective(
        drafter, batch, head, vocabulary_of(drafter), settings, dtype=torch.float64, measure=False
    )
    losses, _ = reference_losses(drafter, batch, head, 3)
    plain, _ = reference_losses(make_drafter(), batch, head, 3)
    for mine, theirs in zip(outcome.losses, losses, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=0)
    # Every switch shows from step 1 on; norm_output leaves step 0 as it is.
    assert all(abs(a - b) > 1e-6 for a, b in zip(losses[1:], plain[1:], strict=True))


def test_supervised_rows_by_hand() -> None:
    # Document 0: prompt of 2, answer of 3. Document 1: prompt of 1, answer of 2, tail of 1.
    batch = make_batch([5, 4], [[0, 0, 1, 1, 1], [0, 1, 1, 0]])
    rows = [supervised_rows(batch, step).nonzero()[:, 0].tolist() for step in range(3)]
    # Row 1 reads the first answer token (t+1 = 2) and is asked for the second.
    assert rows == [[1, 2, 5, 6], [0, 1, 5], [0]]
    counted = [measured_rows(batch, step).nonzero()[:, 0].tolist() for step in range(3)]
    assert counted == [[1, 2, 5], [1], []]


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("loss", ["soft_ce", "lk_alpha", "lk_lambda", "tv"])
def test_a_batch_without_a_supervised_row_has_no_loss(loss: str, trained_head: bool) -> None:
    """A document cut within its prompt, alone in a batch: nothing to learn, and no fault."""
    drafter, batch = make_drafter(), make_batch([9], [[0] * 9])
    drafter.lm_head.weight.requires_grad_(trained_head)
    settings = ObjectiveSettings.model_validate({"ttt_steps": 3, "loss": loss})
    for measure in (False, True):
        outcome = objective(
            drafter,
            batch,
            TargetHead(torch.randn(DRAFT, HIDDEN, dtype=torch.float64), None, 1e-5, None),
            vocabulary_of(drafter),
            settings,
            dtype=torch.float64,
            measure=measure,
        )
        outcome.loss.backward()
        assert outcome.loss.item() == 0.0 and outcome.rows == [0, 0, 0]
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is None or not parameter.grad.any(), name


def test_accuracies_count_rows_outside_the_draft_vocabulary_as_misses() -> None:
    drafter, batch = make_drafter(), make_batch(*FULL)
    head = TargetHead(torch.randn(DRAFT, HIDDEN, dtype=torch.float64), None, 1e-5, None)
    best = []
    for start, end in batch.spans:
        logits = document_logits(drafter, batch.token_ids_N[start:end], batch.aux_NPG[start:end], 2)
        best.append([drafter.target_ids(x.argmax(-1)) for x in logits])
    inside = vocabulary_of(drafter).t2d
    hits, cumulative, measured = [0, 0], [0, 0], [0, 0]
    for (start, end), (first, second) in zip(batch.spans, best, strict=True):
        for t in range(end - start - 2):
            right = bool(first[t] == batch.top1_N[start + t + 1])
            hits[0] += right
            cumulative[0] += right
            measured[0] += 1
            if t < end - start - 3:
                again = bool(second[t] == batch.top1_N[start + t + 2])
                hits[1] += again
                cumulative[1] += right and again
                measured[1] += 1
    # Let the drafter be right wherever it can: take its own answers as the verifier's.
    for policy in ("keep", "drop"):
        outcome = objective(
            drafter,
            batch,
            head,
            vocabulary_of(drafter),
            ObjectiveSettings(ttt_steps=2, outside_rows=policy),
            dtype=torch.float64,
            measure=True,
        )
        assert (outcome.hits, outcome.cumulative, outcome.measured) == (hits, cumulative, measured)
        outside = ~inside[batch.top1_N]
        assert outside.any()
        dropped = sum(int(outside[s + 1 : e - 1].sum()) for s, e in batch.spans)
        assert outcome.rows[0] == measured[0] - (dropped if policy == "drop" else 0)


@pytest.mark.parametrize("block", [4, 512])
def test_blocked_attention_is_the_flash_kernel(block: int, monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_ROWS", block)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(3, 11, 8, generator=draw).double() for _ in range(4))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q[None], k[None], v[None], 0.0, True)
    mine, my_lse = attention.blocked_forward(q, k, v)
    torch.testing.assert_close(mine, out[0])
    torch.testing.assert_close(my_lse, lse[0])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    theirs = backward(grad[None], q[None], k[None], v[None], out, lse, 0.0, True)
    made = attention.blocked_backward(grad, q, k, v, my_lse, (grad * mine).sum(-1))
    for a, b in zip(made, theirs, strict=True):
        torch.testing.assert_close(a, b[0])


def test_cached_drafting_is_the_reference() -> None:
    """Rows of true states, then one's own outputs: what TTT trains is what serving runs."""
    drafter, batch = make_drafter(), make_batch([9], [[1] * 9])
    logits = document_logits(drafter, batch.token_ids_N, batch.aux_NPG, 3)
    t = 5
    cache = DraftCache()
    rows = torch.arange(t + 1)
    with torch.no_grad():
        out = drafter.forward_cached(
            batch.token_ids_N[1 : t + 2], drafter.fuse(batch.aux_NPG[: t + 1]), rows, cache
        )
        torch.testing.assert_close(drafter.logits(out), logits[0][: t + 1].detach())
        out = out[-1:]
        for step in (1, 2):
            out = drafter.forward_cached(
                batch.token_ids_N[t + 1 + step, None], out, torch.tensor([t + step]), cache
            )
            torch.testing.assert_close(drafter.logits(out)[0], logits[step][t].detach())
        assert cache.length == t + 3
        cache.crop(t + 1)
        assert cache.length == t + 1
