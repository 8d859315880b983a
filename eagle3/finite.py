"""A step whose loss or gradient is not a number ends the training, and the samples are named.

Knows nothing of how the loss came about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from eagle3.dataset import Document
from eagle3.errors import HarnessError
from eagle3.ranks import Ranks


class LossNotFinite(HarnessError):
    """Training has left the numbers on sound states: settings that cannot learn."""


def refuse_not_finite(
    losses: Sequence[float],
    batches: Sequence[Sequence[Document]],
    norm: float,
    total: float,
    max_length: int,
    ranks: Ranks,
) -> None:
    """Ends the training on all ranks before the step changes any weight.

    Args:
        losses, batches: of this rank's passes.
        norm, total: the gradient's norm and the loss, the same on all ranks.
        max_length: rows read of a document.

    Raises:
        HarnessError: names the samples whose hidden states hold a NaN or infinity; else those of
            the passes whose loss is not finite; else all of the step.
    """
    if math.isfinite(norm) and math.isfinite(total):
        return
    everything = [document for batch in batches for document in batch]
    broken = [document.id for document in everything if not _finite(document, max_length)]
    at_fault = [
        document.id
        for loss, batch in zip(losses, batches, strict=True)
        if not math.isfinite(loss)
        for document in batch
    ]
    ids = [document.id for document in everything]
    gathered = ranks.gather((broken, at_fault, ids))
    broken, at_fault, ids = ([name for mine in gathered for name in mine[i]] for i in range(3))
    if broken:
        raise _broken(broken)
    raise LossNotFinite(
        "the loss is not finite" if at_fault else "the gradient is not finite",
        where=f"samples {', '.join(at_fault or ids)}",
        got=total if at_fault else norm,
        fix="lower the learning rate, or look for odd states in these samples",
    )


def refuse_broken_states(documents: Iterable[Document], max_length: int) -> None:
    """Reads all states of some documents.

    Raises:
        HarnessError: names those with a NaN or infinity, if there are any.
    """
    if ids := [document.id for document in documents if not _finite(document, max_length)]:
        raise _broken(ids)


def _broken(ids: Sequence[str]) -> HarnessError:
    return HarnessError(
        "hidden states hold a NaN or infinity",
        where=f"samples {', '.join(ids)}",
        rule="finite numbers",
        fix="extract these samples again, or leave them out",
    )


def _finite(document: Document, max_length: int) -> bool:
    states = (document.aux[:max_length], document.final[:max_length])
    return all(bool(tensor.isfinite().all()) for tensor in states)
