"""The training loop: steps, evaluation on dev, when to save.

Takes a `Tracker` and an `on_step` callback; knows nothing of where its data and settings come from.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from eagle3.acceptance import summarise
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.parallel import refuse_idle_ranks
from eagle3.progress import Progress, keep_if_best, restore_best, save_progress, take_up
from eagle3.ranks import ALONE, Ranks
from eagle3.replay import replay
from eagle3.schedule import learning_rate
from eagle3.tracking import Tracker
from eagle3.train_settings import TrainSettings
from eagle3.train_step import Learner, TrainData

log = logging.getLogger(__name__)
OnStep = Callable[[int, Drafter], None]


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
    learner = Learner.of(drafter, data, settings, seed, device, ranks)
    trained, optimizer = learner.trained, learner.optimizer
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
        metrics = learner.step(plan[index], rate, measure=logged)
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
            tau = _evaluate(learner, progress, tracker)
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
    learner.shared.release()
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


def _evaluate(learner: Learner, progress: Progress, tracker: Tracker) -> float:
    """Replays the drafter as it is on dev."""
    drafts = learner.settings.dev_drafts
    with learner.shared.assembled() as drafter:
        counts = learner.shared.ranks.on_leader(
            lambda: replay(drafter, learner.data.dev, drafts, dtype=learner.dtype)
        )
    found = summarise(counts)
    metrics = {"dev_tau": found["tau"]}
    for position, rate in enumerate(found["per_position_unconditional"]):
        metrics[f"dev_acceptance_{position}"] = rate
    progress.record(tracker, metrics)
    return metrics["dev_tau"]
