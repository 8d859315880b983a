"""The training loop: steps, evaluation on dev, when to save.

Takes a `Tracker` and an `on_step` callback; knows nothing of where its data and settings come from.

Legend: P aux layers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from eagle3.acceptance import acceptance_length
from eagle3.dataset import Document, StatesDataset
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.finite import refuse_broken_states, refuse_not_finite
from eagle3.initialise import DrafterSettings
from eagle3.loss import TargetHead
from eagle3.noise import NoiseSettings, add_noise, layer_scales
from eagle3.objective import ObjectiveSettings, Outcome, objective, summarise, supervised_in
from eagle3.optimizer import Optimizer, OptimizerName
from eagle3.packing import pack
from eagle3.parallel import Parallel, Shared, clip, refuse_idle_ranks, share
from eagle3.progress import Progress, keep_if_best, restore_best, save_progress, take_up
from eagle3.ranks import ALONE, Ranks
from eagle3.replay import replay
from eagle3.schedule import PlannedStep, Scheduler, learning_rate, plan_steps
from eagle3.settings import Settings
from eagle3.tracking import Tracker
from eagle3.vocab import DraftVocabulary

log = logging.getLogger(__name__)
OnStep = Callable[[int, Drafter], None]


class TrainSettings(Settings):
    """Everything about training that all arms share.

    optimizer: adamw, or muon for the layer's matrices (and adamw for the rest).
    batch_tokens: packed rows of one forward pass; `accumulate` passes make an optimizer step.
    max_length: rows kept of a document.
    dtype: of the computation; parameters and optimizer are float32.
    dev_drafts: drafts a verification step when τ is replayed on dev.
    evaluations: replays on dev during training, evenly spaced, the last after the last step.
    patience: stop after so many replays on dev without a better τ; None: never.
    log_every, save_every: in optimizer steps.
    keep_last: states kept to take up a killed run from; the best weights by dev τ always are.
    parallel: how several processes share the drafter: ddp, whole on each; fsdp, in parts, for one
        that does not fit. Each takes its share of the `accumulate` passes.
    """

    drafter: DrafterSettings = DrafterSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    noise: NoiseSettings = NoiseSettings()
    lr: float = Field(gt=0.0)
    optimizer: OptimizerName = "adamw"
    scheduler: Scheduler = "cosine"
    warmup_ratio: float = Field(0.05, ge=0.0, le=1.0)
    weight_decay: float = Field(0.0, ge=0.0)
    beta2: float = Field(0.95, gt=0.0, lt=1.0)
    clip: float = Field(1.0, gt=0.0)
    batch_tokens: int = Field(1024, gt=0)
    accumulate: int = Field(1, gt=0)
    max_length: int = Field(2048, gt=0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    dev_drafts: int = Field(3, gt=0)
    evaluations: int = Field(6, ge=1)
    patience: int | None = Field(None, ge=1)
    log_every: int = Field(10, ge=1)
    save_every: int = Field(100, ge=1)
    keep_last: int = Field(2, ge=1)
    parallel: Parallel = "ddp"

    def plan(
        self,
        lengths: Sequence[int],
        seed: int,
        *,
        tokens: int | None = None,
        epochs: int | None = None,
    ) -> list[PlannedStep]:
        """All steps of a run on documents of these lengths. See `plan_steps`."""
        return plan_steps(
            lengths,
            batch_tokens=self.batch_tokens,
            max_length=self.max_length,
            accumulate=self.accumulate,
            seed=seed,
            tokens=tokens,
            epochs=epochs,
        )


@dataclass(frozen=True)
class TrainData:
    """What a training run reads.

    Attributes:
        documents: training samples.
        lengths: tokens of each.
        dev: samples with greedy answers for τ by replay; empty to do without.
        head: from final states to target logits, float32.
        vocabulary: of the drafter.
    """

    documents: StatesDataset | Sequence[Document]
    lengths: Sequence[int]
    dev: Sequence[Document]
    head: TargetHead
    vocabulary: DraftVocabulary


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. The drafter handed in holds the best weights by dev τ.

    Attributes:
        steps, tokens: of the training, less than planned where it stopped early.
        history: (metric, step, value), the same for the same seed on the same machine type.
        best_step, best_tau: the step kept and its τ on dev; without dev, the last step and None.
    """

    steps: int
    tokens: int
    best_step: int
    best_tau: float | None
    history: list[tuple[str, int, float]]
    stopped_early: bool = False


def train(
    drafter: Drafter,
    data: TrainData,
    settings: TrainSettings,
    *,
    seed: int,
    tokens: int | None,
    epochs: int | None,
    device: torch.device,
    work: Path,
    tracker: Tracker,
    on_step: OnStep | None = None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Trains a drafter in place; killed and started again with the same arguments, it goes on, on
    whatever number of ranks.

    Args:
        tokens, epochs: the budget, one of them.
        work: folder for resume states and the best weights so far.
        tracker: of rank 0; the others' is not told anything.
        on_step: called with step and drafter after each step that is not the last, to look and
            not to touch; may raise to stop the run.
        ranks: the processes that train this drafter; all call with the same arguments.

    Raises:
        HarnessError: nothing to learn from, a loss or state that is not finite (names the
            samples), a training state that cannot be saved, `patience` without dev samples, or
            ranks without work.
    """
    refuse_idle_ranks(ranks, settings.accumulate)
    if settings.patience is not None and not data.dev:
        raise HarnessError(
            "early stopping needs samples to evaluate on",
            where="train.patience",
            rule="a dev split, or null",
            got=settings.patience,
            fix="hold samples out (prompts.dev_share, --val-ratio), or set train.patience to null",
        )
    plan = settings.plan(data.lengths, seed, tokens=tokens, epochs=epochs)
    if not plan:
        raise HarnessError(
            "nothing to train on",
            where="training documents and their budget",
            rule="at least one document",
            got=0,
            fix="more training data, or a larger budget",
        )
    drafter.to(device)
    drafter.lm_head.weight.requires_grad_(settings.drafter.head != "frozen")
    dtype = getattr(torch, settings.dtype)
    if settings.drafter.head == "frozen":
        # Nothing is added to it, so it needs no float32 and no cast in every step.
        drafter.lm_head.to(dtype)
    drafter.embed_VH = drafter.embed_VH.to(dtype)
    shared = share(drafter, settings.parallel, ranks)
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    optimizer = Optimizer(
        settings.optimizer, trained, beta2=settings.beta2, weight_decay=settings.weight_decay
    )
    data = replace(data, head=_head_on(data.head, device, dtype))
    scales = layer_scales(data.documents) if settings.noise.kind == "gaussian_relative" else None
    if scales is not None and not bool(scales.isfinite().all()):
        refuse_broken_states(data.documents, settings.max_length)
    progress = take_up(work, trained, optimizer, ranks)
    stopped_early = False
    evaluations = {
        math.ceil(len(plan) * (i + 1) / settings.evaluations) for i in range(settings.evaluations)
    }
    done = plan[progress.step - 1].tokens_after if progress.step else 0
    bar = tqdm(
        total=plan[-1].tokens_after,
        initial=done,
        unit="tok",
        unit_scale=True,
        desc="training",
        mininterval=1.0,
        disable=not ranks.leads,
    )
    clock = time.perf_counter()
    tokens_then = done
    for index in range(progress.step, len(plan)):
        step = index + 1
        logged = step % settings.log_every == 0 or step == 1 or step == len(plan)
        rate = learning_rate(
            index,
            len(plan),
            peak=settings.lr,
            scheduler=settings.scheduler,
            warmup_ratio=settings.warmup_ratio,
        )
        metrics = _optimize(
            shared,
            trained,
            optimizer,
            rate,
            data,
            plan[index],
            settings,
            scales,
            seed,
            device,
            logged,
        )
        progress.step = step
        bar.update(plan[index].tokens_after - done)
        done = plan[index].tokens_after
        if logged:
            metrics |= {"lr": rate, "tokens": float(plan[index].tokens_after)}
            seconds = time.perf_counter() - clock
            speed = {"tokens_per_s": (done - tokens_then) / seconds}
            clock, tokens_then = time.perf_counter(), done
            progress.record(tracker, metrics, speed)
            tau_now = progress.last("dev_tau")
            bar.set_postfix(
                loss=f"{metrics['loss']:.3f}", dev_tau="-" if tau_now is None else f"{tau_now:.3f}"
            )
        if step in evaluations and data.dev:
            tau = _evaluate(shared, data, settings, progress, tracker, dtype)
            keep_if_best(progress, tau, work, trained, ranks)
            clock, tokens_then = time.perf_counter(), done
            if settings.patience and progress.evaluations_since_best() >= settings.patience:
                stopped_early = step < len(plan)
                break
        if on_step is not None and step < len(plan):
            on_step(step, drafter)
        if step % settings.save_every == 0 and step < len(plan):
            save_progress(work, progress, trained, optimizer, settings.keep_last, ranks)
    bar.close()
    if stopped_early:
        log.info("stopped early, after step %d of %d", progress.step, len(plan))
        tracker.log_tags({"stopped_early": f"after step {progress.step} of {len(plan)}"})
    shared.release()
    if progress.best_tau is None:
        progress.best_step = progress.step
    else:
        restore_best(progress, work, {n: p for n, p in drafter.named_parameters() if n in trained})
    return TrainResult(
        steps=progress.step,
        tokens=plan[progress.step - 1].tokens_after,
        best_step=progress.best_step,
        best_tau=progress.best_tau,
        history=progress.history,
        stopped_early=stopped_early,
    )


def _head_on(head: TargetHead, device: torch.device, dtype: torch.dtype) -> TargetHead:
    norm = None if head.norm_G is None else head.norm_G.to(device, dtype)
    return replace(head, rows_DG=head.rows_DG.to(device, dtype), norm_G=norm)


def _optimize(
    shared: Shared,
    trained: dict[str, torch.nn.Parameter],
    optimizer: Optimizer,
    rate: float,
    data: TrainData,
    planned: PlannedStep,
    settings: TrainSettings,
    scales_P: Tensor | None,
    seed: int,
    device: torch.device,
    measure: bool,
) -> dict[str, float]:
    """One optimizer step, its batches dealt out to the ranks in turn; its metrics if measured."""
    ranks, several = shared.ranks, len(planned.batches) > 1
    rows_in_all = None
    if several:
        everything = [data.documents[i] for indices in planned.batches for i in indices]
        rows_in_all = supervised_in(
            everything, data.vocabulary, settings.objective, max_length=settings.max_length
        )
    mine = planned.batches[ranks.rank :: ranks.count]
    rounds = math.ceil(len(planned.batches) / ranks.count)
    outcomes: list[Outcome] = []
    read: list[list[Document]] = []
    for number in range(rounds):
        run = None
        if number < len(mine):
            read.append([data.documents[i] for i in mine[number]])
            batch = pack(read[-1], settings.max_length)
            noisy = add_noise(batch, settings.noise, scales_P, seed=seed, epoch=planned.epoch)
            run = partial(
                objective,
                batch=replace(batch, aux_NPG=noisy).to(device),
                head=data.head,
                vocabulary=data.vocabulary,
                settings=settings.objective,
                dtype=getattr(torch, settings.dtype),
                measure=measure,
                rows_in_all=rows_in_all,
            )
        outcome = shared.backward(run, last=number == rounds - 1)
        if outcome is not None:
            outcomes.append(outcome.detached())
    norm = clip(trained.values(), settings.clip)
    losses = [outcome.loss.item() for outcome in outcomes]
    total = ranks.sum(torch.tensor(sum(losses), dtype=torch.float64)).item()
    refuse_not_finite(losses, read, norm, total, settings.max_length, ranks)
    optimizer.step(rate)
    if not measure:
        return {}
    gathered = ranks.gather(outcomes)
    in_order = [o for dealt in zip_longest(*gathered) for o in dealt if o is not None]
    return summarise(in_order) | {"gradient_norm": norm}


def _evaluate(
    shared: Shared,
    data: TrainData,
    settings: TrainSettings,
    progress: Progress,
    tracker: Tracker,
    dtype: torch.dtype,
) -> float:
    with shared.assembled() as drafter:
        counts = shared.ranks.on_leader(
            lambda: replay(drafter, data.dev, settings.dev_drafts, dtype=dtype)
        )
    steps = sum(count.verify_steps for count in counts)
    tau = acceptance_length(sum(count.accepted for count in counts), steps)
    metrics = {"dev_tau": tau}
    for position in range(settings.dev_drafts):
        accepted = sum(count.accepted_per_position[position] for count in counts)
        metrics[f"dev_acceptance_{position}"] = accepted / max(steps, 1)
    progress.record(tracker, metrics)
    return tau
