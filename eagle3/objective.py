"""The training objective: the verifier's distribution, learnt at every TTT step.

Joins what a row is asked for (`packing`), what the drafter answers (`ttt`) and how far that is off
(`loss`). Knows nothing of optimizers or of files.

Legend: N packed rows, R active rows, D draft vocabulary, G verifier hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eagle3.dataset import Document
from eagle3.drafter import Drafter
from eagle3.loss import TargetHead, Targets, soft_cross_entropy, soft_targets
from eagle3.loss_acceptance import AcceptanceTargets, acceptance_loss
from eagle3.packing import Batch, measured_rows, pack, shifted, supervised_rows
from eagle3.settings import Settings
from eagle3.ttt import cast_weights, ttt_steps
from eagle3.vocab import DraftVocabulary


class ObjectiveSettings(Settings):
    """What is learnt.

    loss: soft_ce, cross-entropy against the verifier's distribution restricted to the draft
        vocabulary; or one on the acceptance rate of sampled drafts (`loss_acceptance`): tv,
        lk_alpha, lk_lambda.
    lk_eta: how fast lk_lambda turns from divergence to acceptance.
    ttt_steps: how many of its own outputs the drafter is trained on.
    step_decay: step k weighs step_decay**k (speculators 1.0; EAGLE, SpecForge and TorchSpec 0.8).
    outside_rows: what happens in the loss to rows whose verifier argmax lies outside the draft
        vocabulary. Accuracies count them as misses either way.
    """

    loss: Literal["soft_ce", "tv", "lk_alpha", "lk_lambda"] = "soft_ce"
    lk_eta: float = Field(3.0, ge=0.0)
    ttt_steps: int = Field(3, ge=1, le=16)
    step_decay: float = Field(1.0, gt=0.0, le=1.0)
    outside_rows: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True)
class Outcome:
    """Of one batch.

    Attributes:
        loss: what to differentiate: the weighted sum over steps of each step's mean over rows, or
            this batch's part of it where the mean is over several batches.
        losses: per step, mean loss over its supervised rows (0 where none); of soft_ce in nats.
        divergences: per step, the same less what the best drafter with this vocabulary would have;
            of soft_ce the verifier's entropy is taken off, which leaves the KL divergence. Empty
            when not measured.
        rows: per step, the number of supervised rows.
        hits, cumulative, measured: per step: rows whose argmax is the verifier's, rows right at
            this step and all before, rows counted. Empty when not measured.
    """

    loss: Tensor
    losses: list[Tensor]
    divergences: list[Tensor]
    rows: list[int]
    hits: list[int]
    cumulative: list[int]
    measured: list[int]

    def detached(self) -> Outcome:
        """The same numbers without the graph, where any process can read them."""
        return replace(
            self,
            loss=self.loss.detach().cpu(),
            losses=[value.cpu() for value in self.losses],
            divergences=[value.cpu() for value in self.divergences],
        )


def objective(
    drafter: Drafter,
    batch: Batch,
    head: TargetHead,
    vocabulary: DraftVocabulary,
    settings: ObjectiveSettings,
    *,
    dtype: torch.dtype,
    measure: bool,
    rows_in_all: Sequence[int] | None = None,
) -> Outcome:
    """Loss and, if wanted, accuracies of one batch at every TTT step.

    Args:
        dtype: of the computation; parameters and their gradients keep their own.
        measure: also entropies and right argmaxes, which cost about a tenth of the time.
        rows_in_all: per step, the supervised rows of all batches of the optimizer step
            (`supervised_in`), so that rows weigh alike whatever batch they came in. None: this
            batch is all there is.
    """
    steps = settings.ttt_steps
    device = batch.token_ids_N.device
    top1_N = vocabulary.draft_of.to(device)[batch.top1_N]
    supervised = _asked(batch, top1_N, settings)
    active_R, place_N = _any_of(supervised)
    target_rows, target_place_N = _any_of(
        [shifted(rows, -1 - step) for step, rows in enumerate(supervised)]
    )

    weights = cast_weights(drafter, dtype)
    trained_head = drafter.lm_head.weight.requires_grad
    final_RG = batch.final_NG[target_rows].to(dtype)
    targets: Targets | AcceptanceTargets
    if settings.loss == "soft_ce":
        targets = soft_targets(
            final_RG, head, weights.head_DH.detach(), keep=trained_head, entropy=measure
        )
    else:
        lse_R = batch.lse_N[target_rows]
        targets = AcceptanceTargets(final_RG, lse_R, head, settings.loss, settings.lk_eta)
    total = torch.zeros((), device=device)
    outcome = Outcome(total, [], [], [], [], [], [])  # lists are filled step by step
    right_N = torch.ones_like(supervised[0])
    for step, out_RH in enumerate(ttt_steps(drafter, weights, batch, active_R, steps)):
        rows = supervised[step].nonzero()[:, 0]
        picked = target_place_N[rows + 1 + step]
        x = out_RH if len(rows) == len(active_R) else out_RH[place_N[rows]]
        if isinstance(targets, AcceptanceTargets):
            loss, least, best = acceptance_loss(x, weights.head_DH, targets, picked, argmax=measure)
        else:
            loss, best = soft_cross_entropy(x, weights.head_DH, targets, picked, argmax=measure)
            least = loss if targets.entropy_R is None else targets.entropy_R[picked].sum()
        mean = loss / max(len(rows), 1)
        part = mean if rows_in_all is None else loss / max(rows_in_all[step], 1)
        total = total + settings.step_decay**step * part
        outcome.losses.append(mean.detach())
        outcome.rows.append(len(rows))
        if measure:
            outcome.divergences.append(mean.detach() - least / max(len(rows), 1))
        if best is not None:
            hit_N = torch.zeros_like(right_N)
            hit_N[rows] = best == top1_N[rows + 1 + step]
            right_N &= hit_N
            counted = measured_rows(batch, step)
            outcome.hits.append(int((hit_N & counted).sum()))
            outcome.cumulative.append(int((right_N & counted).sum()))
            outcome.measured.append(int(counted.sum()))
    return replace(outcome, loss=total)


def _asked(batch: Batch, top1_N: Tensor, settings: ObjectiveSettings) -> list[Tensor]:
    """The rows in the loss of each TTT step, bool [N]."""
    supervised = [supervised_rows(batch, step) for step in range(settings.ttt_steps)]
    if settings.outside_rows == "keep":
        return supervised
    # The target of row t at step k stands at t+1+k.
    return [rows & shifted(top1_N >= 0, 1 + k) for k, rows in enumerate(supervised)]


def _any_of(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows that any of some masks [N] names, ascending, and each row's place among them, i64 [N]:
    -1 where it is not."""
    chosen_N = torch.stack(list(masks)).any(0)
    rows = chosen_N.nonzero()[:, 0]
    place_N = torch.full_like(chosen_N, -1, dtype=torch.int64)
    place_N[rows] = torch.arange(len(rows), device=rows.device)
    return rows, place_N


def supervised_in(
    documents: Sequence[Document],
    vocabulary: DraftVocabulary,
    settings: ObjectiveSettings,
    *,
    max_length: int,
) -> list[int]:
    """Per TTT step, the rows in the loss over documents; their states are not read."""
    lean = []
    for document in documents:
        nothing = torch.empty(len(document.token_ids), 0)
        lean.append(replace(document, aux=nothing, final=nothing))
    batch = pack(lean, max_length)
    return [int(rows.sum()) for rows in _asked(batch, vocabulary.draft_of[batch.top1_N], settings)]


def summarise(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Metrics of one optimizer step from all its batches; rows weigh alike in whatever batch.

    loss_k and divergence_k: means over the supervised rows of TTT step k. accuracy_k: share of
    counted rows with the verifier's argmax; cumulative_k: right at every step up to k;
    conditional_k: of those right before, the share still right.
    """
    metrics: dict[str, float] = {"loss": sum(o.loss.item() for o in outcomes)}
    right_before = 1.0
    for k in range(len(outcomes[0].rows)):
        rows = sum(o.rows[k] for o in outcomes)
        for name in ("losses", "divergences"):
            total = sum(getattr(o, name)[k].item() * o.rows[k] for o in outcomes)
            metrics[f"{'loss' if name == 'losses' else 'divergence'}_{k}"] = total / max(rows, 1)
        measured = max(sum(o.measured[k] for o in outcomes), 1)
        cumulative = sum(o.cumulative[k] for o in outcomes) / measured
        metrics[f"accuracy_{k}"] = sum(o.hits[k] for o in outcomes) / measured
        metrics[f"cumulative_{k}"] = cumulative
        metrics[f"conditional_{k}"] = cumulative / right_before if right_before else 0.0
        right_before = cumulative
    return metrics
