"""A task of the training benchmark by this project's trainer, in rounds.

`python -m experiments.benchmarks.train_eagle3 FOLDER OUT` writes the weights that it ends at. The
loop is `eagle3.trainer.train` itself: it stands still between rounds inside its tracker, which it
tells its metrics at the end of each.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3.machine import keep_freed_memory
from eagle3.tracking import NullTracker
from eagle3.trainer import train
from experiments.benchmarks.rounds import Turns
from experiments.benchmarks.training_task import SEED, read_task


class RoundTracker(NullTracker):
    """Ends a turn and waits for the next when a round's last step is told."""

    def __init__(self, turns: Turns, round_steps: int) -> None:
        self._turns, self._round_steps = turns, round_steps

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if step % self._round_steps == 0:
            self._turns.end()
            self._turns.begin()


def main(folder: Path, out: Path) -> None:
    turns = Turns()
    keep_freed_memory()  # as every command of the project that trains
    task = read_task(folder)
    drafter = task.drafter({})
    turns.begin()
    with tempfile.TemporaryDirectory() as work:
        train(
            drafter,
            task.data,
            task.settings,
            seed=SEED,
            tokens=sum(task.round_tokens),
            epochs=None,
            device=torch.device("cpu"),
            work=Path(work),
            tracker=RoundTracker(turns, task.round_steps),
        )
    trained = {name: p.detach() for name, p in drafter.named_parameters() if p.requires_grad}
    save_file(trained, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
