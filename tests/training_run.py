"""Trainings that tests run in processes of their own (`tests.forking`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3 import train_step
from eagle3.dataset import Document
from eagle3.packing import Batch, pack
from eagle3.ranks import joined
from eagle3.settings import merged
from eagle3.tracking import NullTracker
from eagle3.train_settings import TrainSettings
from eagle3.trainer import train
from tests.tiny_training import SETTINGS, make_data, make_drafter


def train_in(
    folder: str,
    *,
    changes: dict[str, Any] | None = None,
    epochs: int = 3,
    stop_after: int | None = None,
    broken: dict[str, float] | None = None,
) -> None:
    """A training in `folder/work`; what it came to in `folder/end.safetensors` and `history.json`.

    Each rank's batches, as lists of sample ids, are in `folder/read-<rank>.json`.

    Args:
        stop_after: optimizer steps after which this process ends as if killed.
        broken: values put into the aux states of samples, by id.
    """
    torch.set_num_threads(1)
    out, work = Path(folder), Path(folder) / "work"
    work.mkdir(exist_ok=True)
    settings = TrainSettings.model_validate(merged(SETTINGS.model_dump(), changes or {}))
    drafter = make_drafter().float()
    data = make_data(drafter)
    for document in data.documents:
        if broken and document.id in broken:
            document.aux[4] = broken[document.id]
    read: list[list[str]] = []

    def packed(documents: Sequence[Document], max_length: int) -> Batch:
        read.append([document.id for document in documents])
        return pack(documents, max_length)

    train_step.pack = packed  # type: ignore[assignment]
    original, steps = train_step.Learner.step, []

    def counted(*args: Any, **named: Any) -> dict[str, float]:
        if len(steps) == stop_after:
            raise SystemExit("killed")
        steps.append(1)
        return original(*args, **named)

    train_step.Learner.step = counted  # type: ignore[method-assign]
    with joined("cpu") as ranks:
        try:
            result = train(
                drafter,
                data,
                settings,
                seed=5,
                tokens=None,
                epochs=epochs,
                device=torch.device("cpu"),
                work=work,
                tracker=NullTracker(),
                ranks=ranks,
            )
        finally:
            (out / f"read-{ranks.rank}.json").write_text(json.dumps(read))
        if ranks.leads:
            save_file(drafter.state_dict(), out / "end.safetensors")
            (out / "history.json").write_text(json.dumps(result.history))
