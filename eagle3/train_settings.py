"""The `train` section: everything about training that all arms share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from eagle3.initialise import DrafterSettings
from eagle3.noise import NoiseSettings
from eagle3.objective import ObjectiveSettings
from eagle3.optimizer import OptimizerName
from eagle3.parallel import Parallel
from eagle3.schedule import PlannedStep, Scheduler, plan_steps
from eagle3.settings import Settings


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
