"""The processes that train one drafter together: who this one is, and agreeing with the others.

`torchrun` starts them and says in the environment which is which. Rank 0 leads: it alone logs,
evaluates and writes. Knows nothing of training; torch is imported only where there are several.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3.errors import HarnessError

if TYPE_CHECKING:
    from torch import Tensor

# The others wait for the leader's replay on dev and for its disk; a dead rank is noticed at once.
PATIENCE = timedelta(hours=2)
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `count`. Every method is called by all ranks or by none."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the one that logs, evaluates and writes."""
        return self.rank == 0

    def on_leader(self, work: Callable[[], T]) -> T:
        """Runs on rank 0 alone; all ranks get what it returned, or end with its error."""
        if self.count == 1:
            return work()
        import torch.distributed as dist

        said: list[Any] = [None, None]
        error: Exception | None = None
        if self.leads:
            try:
                said[0] = work()
            except Exception as caught:
                error, said[1] = caught, str(caught) or type(caught).__name__
        dist.broadcast_object_list(said, src=0)
        if error is not None:
            raise error
        if said[1] is not None:
            raise HarnessError("rank 0 stopped", got=said[1])
        return said[0]

    def gather(self, mine: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.count == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine)
        return found

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.count > 1:
            import torch.distributed as dist

            dist.all_reduce(mine)
        return mine


ALONE = Ranks()


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """This process's place among those that `torchrun` started, connected until the block ends.

    Without `torchrun`, or with one process, nothing is connected. The others' loggers tell
    warnings only.

    Args:
        device: `cpu` (gloo), or the kind of accelerator; each process takes the one of its own
            local rank.
    """
    ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    if ranks.count == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    kind = torch.device(device).type
    backend = "gloo"
    if kind != "cpu":
        torch.get_device_module(kind).set_device(int(os.environ["LOCAL_RANK"]))
        # Words among ranks go over gloo, from memory; gradients over the accelerator's own.
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if not ranks.leads:
        logging.getLogger().setLevel(logging.WARNING)
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
