"""One training of a study and its τ: the same code, budget and result as the train stage's.

Knows nothing of the store, the sampler or MLflow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.acceptance import PromptCounts, summarise
from eagle3.arm import first_drafter, init_digest
from eagle3.dataset import Document
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.finite import LossNotFinite
from eagle3.machine import keep_freed_memory
from eagle3.replay import replay
from eagle3.tracking import Tracker
from eagle3.train_settings import TrainSettings
from eagle3.trainer import OnStep, TrainResult, train
from eagle3.workspace import work_folder
from experiments.study.bench import Bench, BenchArm


class GivenUp(Exception):
    """Raised by `on_step` to end a training that is not worth its budget."""


def train_once(
    bench: Bench,
    arm: BenchArm,
    settings: TrainSettings,
    *,
    seed: int,
    tokens: int,
    tracker: Tracker,
    on_step: OnStep | None = None,
) -> tuple[Drafter, TrainResult]:
    """Trains a drafter; the one returned holds the weights that the train stage would publish.

    A killed one leaves its state in `.work/`, where the same training takes it up.

    Raises:
        GivenUp: as `on_step` did.
        HarnessError: as the trainer does; `LossNotFinite` among them.
    """
    keep_freed_memory()
    key = {
        "arm": arm.entry.model_dump(mode="json"),
        "init": init_digest(arm.init),
        "settings": settings.model_dump(mode="json"),
        "seed": seed,
        "tokens": tokens,
        "facts": bench.facts(arm),
        "threads": torch.get_num_threads(),
        "part": arm.part,
    }
    ended: Exception | None = None
    with _work(bench.root, key) as work:
        try:
            drafter = first_drafter(arm.init, arm.data, settings, seed, arm.entry.init_layers)
            result = train(
                drafter,
                arm.data.as_train_data(),
                settings,
                seed=seed,
                tokens=tokens,
                epochs=None,
                device=torch.device(bench.run.device),
                work=work,
                tracker=tracker,
                on_step=on_step,
            )
        except (GivenUp, LossNotFinite) as error:  # ended for good: nothing to take up
            ended = error
    if ended is not None:
        raise ended
    return drafter, result


def score(
    drafter: Drafter, documents: Sequence[Document], drafts: int, dtype: str
) -> list[PromptCounts]:
    """Acceptance on some answers by replay."""
    return replay(drafter, documents, drafts, dtype=getattr(torch, dtype))


def length(counts: Sequence[PromptCounts]) -> float:
    """τ over all of them together."""
    return float(summarise(counts)["tau"])


@contextlib.contextmanager
def _work(root: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(work_folder(root, "study", key))
        except HarnessError:
            # A worker that was taken for dead is at it still: this one works beside it.
            folder = stack.enter_context(work_folder(root, "study", {**key, "pid": os.getpid()}))
        yield folder
