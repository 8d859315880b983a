"""One drafter trained by several processes: whole on each (DDP), or in parts (FSDP2).

Each process passes over its own share of a step's micro-batches; the sums of their gradients are
those of one process that passed over all. Only what is trained is synchronised or sharded: the
embedding, and a frozen head, lie whole on every rank. Knows nothing of losses or data.

FSDP2 here shards masters, gradients and optimizer moments; the weights of the one layer are brought
together for each pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.objective import Outcome
from eagle3.ranks import Ranks

Parallel = Literal["ddp", "fsdp"]
Run = Callable[[Drafter], Outcome]


class Pass(nn.Module):
    """A forward pass and its loss as a module: what DDP and FSDP2 hang their hooks on."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, run: Run | None) -> tuple[Tensor, Outcome | None]:
        """Loss and outcome; without `run`, a zero that every trained parameter takes part in."""
        outcome = None if run is None else run(self.drafter)
        if outcome is not None and outcome.loss.requires_grad:
            return outcome.loss, outcome
        parts = [p.sum() for p in self.drafter.parameters() if p.requires_grad]
        return torch.stack(parts).sum() * 0.0, outcome


@dataclass
class Shared:
    """A drafter as this process trains it. Every method is called by all ranks alike."""

    drafter: Drafter
    ranks: Ranks
    module: Any = None

    def backward(self, run: Run | None, *, last: bool) -> Outcome | None:
        """One pass of this rank, its gradients added up; summed over ranks after the last one.

        Args:
            run: the pass; None where this rank has nothing left in the step.
            last: of the optimizer step.
        """
        if self.module is None:
            if run is None:
                return None
            outcome = run(self.drafter)
            if outcome.loss.requires_grad:
                outcome.loss.backward()
            return outcome
        later: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(self.module, nn.parallel.DistributedDataParallel):
            later = later if last else self.module.no_sync()
        else:
            self.module.set_requires_gradient_sync(last)
        with later:
            loss, shared_outcome = self.module(run)
            # Both take the mean over ranks; the loss is divided by the rows of all of them already.
            (loss * self.ranks.count).backward()
        return shared_outcome

    @contextlib.contextmanager
    def assembled(self) -> Iterator[Drafter]:
        """The drafter with whole weights, to be read only."""
        if not _sharded(self.drafter.fc.weight):
            yield self.drafter
            return
        self.module.unshard()
        try:
            yield self.drafter
        finally:
            self.module.reshard()

    @torch.no_grad()
    def release(self) -> None:
        """Makes the drafter a plain module with whole weights again; it is trained no more."""
        for part in self.drafter.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                if _sharded(parameter):
                    setattr(part, name, nn.Parameter(whole(parameter)))
        self.module = None


def share(drafter: Drafter, kind: Parallel, ranks: Ranks) -> Shared:
    """Prepares a drafter, which lies on its device with its frozen parts frozen, for training."""
    if ranks.count == 1:
        return Shared(drafter, ranks)
    if kind == "ddp":
        module = nn.parallel.DistributedDataParallel(
            Pass(drafter), forward_sync_buffers=False, init_sync=False, gradient_as_bucket_view=True
        )
        return Shared(drafter, ranks, module)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(drafter.fc.weight.device.type, (ranks.count,))
    frozen = {parameter for parameter in drafter.parameters() if not parameter.requires_grad}
    return Shared(drafter, ranks, fully_shard(Pass(drafter), mesh=mesh, ignored_params=frozen))


def refuse_idle_ranks(ranks: Ranks, accumulate: int) -> None:
    """Raises:
    HarnessError: there are more processes than passes in an optimizer step.
    """
    if ranks.count > accumulate:
        raise HarnessError(
            "more processes than passes in an optimizer step: some would have nothing to do",
            where="train.accumulate",
            rule=f"at least {ranks.count}, the number of processes",
            got=accumulate,
            fix="raise accumulate; for the same global batch, lower batch_tokens as much",
        )


def clip(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scales gradients to a norm of at most `most`; returns the norm before, over all ranks."""
    trained = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    norm = whole(norm)
    torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return norm.item()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded over ranks, which then all have to ask."""
    return tensor.detach().full_tensor() if _sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, sharded as `model` is; every rank has the whole, so nothing is sent."""
    if not _sharded(model):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(model, DTensor)
    return distribute_tensor(
        tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None
    )


def _sharded(tensor: Tensor) -> bool:
    # Without the import of DTensor's module, which a single process can do without.
    return hasattr(tensor, "full_tensor")
