"""One optimizer step: its passes, dealt out to the ranks in turn, and their update.

Knows nothing of when a step is taken, evaluated or saved.

Legend: P aux layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from eagle3.dataset import Document
from eagle3.drafter import Drafter
from eagle3.finite import refuse_broken_states, refuse_not_finite
from eagle3.loss import TargetHead
from eagle3.noise import add_noise, layer_scales
from eagle3.objective import Outcome, objective, summarise, supervised_in
from eagle3.optimizer import Optimizer
from eagle3.packing import pack
from eagle3.parallel import Shared, clip, share
from eagle3.ranks import Ranks
from eagle3.schedule import PlannedStep
from eagle3.train_settings import TrainSettings
from eagle3.vocab import DraftVocabulary


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

    documents: Sequence[Document]
    lengths: Sequence[int]
    dev: Sequence[Document]
    head: TargetHead
    vocabulary: DraftVocabulary


@dataclass(frozen=True)
class Learner:
    """A drafter made ready to learn, and all that each of its steps works with.

    Attributes:
        trained: its parameters that learn, by name.
        data: with the head on the device, in the dtype of the computation.
        scales_P: each aux layer's size, where the noise is relative to it.
    """

    shared: Shared
    trained: dict[str, torch.nn.Parameter]
    optimizer: Optimizer
    data: TrainData
    settings: TrainSettings
    scales_P: Tensor | None
    seed: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    @classmethod
    def of(
        cls,
        drafter: Drafter,
        data: TrainData,
        settings: TrainSettings,
        seed: int,
        device: torch.device,
        ranks: Ranks,
    ) -> Learner:
        """Puts the drafter on its device, freezes what does not learn, and shares it among ranks.

        Raises:
            HarnessError: states that are not finite (names the samples).
        """
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
        relative = settings.noise.kind == "gaussian_relative"
        scales = layer_scales(data.documents) if relative else None
        if scales is not None and not bool(scales.isfinite().all()):
            refuse_broken_states(data.documents, settings.max_length)
        return cls(shared, trained, optimizer, data, settings, scales, seed, device)

    def step(self, planned: PlannedStep, rate: float, *, measure: bool) -> dict[str, float]:
        """Reads the batches of a step and updates the weights; its metrics if measured.

        Raises:
            HarnessError: a loss or state that is not finite (names the samples).
        """
        ranks, data, settings = self.shared.ranks, self.data, self.settings
        rows_in_all = None
        if len(planned.batches) > 1:
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
                noisy = add_noise(
                    batch, settings.noise, self.scales_P, seed=self.seed, epoch=planned.epoch
                )
                run = partial(
                    objective,
                    batch=replace(batch, aux_NPG=noisy).to(self.device),
                    head=data.head,
                    vocabulary=data.vocabulary,
                    settings=settings.objective,
                    dtype=self.dtype,
                    measure=measure,
                    rows_in_all=rows_in_all,
                )
            outcome = self.shared.backward(run, last=number == rounds - 1)
            if outcome is not None:
                outcomes.append(outcome.detached())
        norm = clip(self.trained.values(), settings.clip)
        losses = [outcome.loss.item() for outcome in outcomes]
        total = ranks.sum(torch.tensor(sum(losses), dtype=torch.float64)).item()
        refuse_not_finite(losses, read, norm, total, settings.max_length, ranks)
        self.optimizer.step(rate)
        if not measure:
            return {}
        gathered = ranks.gather(outcomes)
        in_order = [o for dealt in zip_longest(*gathered) for o in dealt if o is not None]
        return summarise(in_order) | {"gradient_norm": norm}


def _head_on(head: TargetHead, device: torch.device, dtype: torch.dtype) -> TargetHead:
    norm = None if head.norm_G is None else head.norm_G.to(device, dtype)
    return replace(head, rows_DG=head.rows_DG.to(device, dtype), norm_G=norm)
