"""One sample of another program's hidden states: its tensors, taken and checked.

What does not fit is refused with the file's name, before anything is computed from it. Knows no
format.

Shape suffixes: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import HarnessError

SAMPLE = "write or copy the sample's file again, or remove it"
STATES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class RawSample:
    """One sample as stored.

    Attributes:
        token_ids: [T], any whole-number dtype.
        loss_mask: [T], of zeros and ones in any dtype.
        aux: one [T, H] for each aux layer, in stored order.
        final: [T, H].
    """

    token_ids: Tensor
    loss_mask: Tensor
    aux: Sequence[Tensor]
    final: Tensor


def tensor_of(data: dict[str, Any], name: str, axes: int, path: Path) -> Tensor:
    """A dense tensor by name, without the axis of 1 that stands for a batch.

    Args:
        axes: that it has then.

    Raises:
        HarnessError: no such tensor.
    """
    if name not in data:
        raise HarnessError(
            "a sample lacks what its format holds", where=path, rule=name,
            got=f"no {name}; there are {', '.join(map(str, data)) or 'none'}", fix=SAMPLE,
        )  # fmt: skip
    tensor = data[name]
    if isinstance(tensor, Tensor) and tensor.dim() == axes + 1 and len(tensor) == 1:
        tensor = tensor[0]
    dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
    if not dense or tensor.dim() != axes:
        raise HarnessError(
            "a sample does not hold what its format does", where=f"{path}, {name}",
            rule=f"a tensor of {axes} {'axis' if axes == 1 else 'axes'}", got=kind_of(tensor),
            fix=SAMPLE,
        )  # fmt: skip
    return tensor


def kind_of(value: object) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        kind = "meta (without values)" if value.is_meta else value.layout
        return f"{kind} {value.dtype} {list(value.shape)}"
    return f"{type(value).__name__}{' without entries' if value in ([], ()) else ''}"


def check_sample(sample: RawSample, path: Path) -> None:
    """Raises for parts that do not fit each other, dtypes that are not read, no mask."""
    rows = len(sample.token_ids)
    states = (*sample.aux, sample.final)
    shapes = [list(state.shape) for state in states]
    wanted = [rows, sample.final.shape[-1]]
    if not rows or not sample.aux or any(shape != wanted for shape in shapes):
        raise HarnessError(
            "states and tokens of a sample differ in number, so nobody can say which belongs where"
            if rows
            else "a sample without tokens",
            where=path,
            rule=f"{rows or 'some'} tokens, and one aux state or more of {wanted}",
            got=", ".join(map(str, shapes[:8])),
            fix="remove the sample's file, or extract it again without prefix cache and chunks",
        )
    if len(sample.loss_mask) != rows:
        raise HarnessError(
            "loss mask and tokens of a sample differ in number", where=path, rule=rows,
            got=len(sample.loss_mask), fix="remove the sample's file, or prepare it again",
        )  # fmt: skip
    ids, mask = sample.token_ids, sample.loss_mask
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise HarnessError(
            "token ids of a sample are no whole numbers", where=path, rule="an integer dtype",
            got=ids.dtype, fix=SAMPLE,
        )  # fmt: skip
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise HarnessError(
            "the loss mask of a sample holds something else than 0 and 1", where=path,
            rule="0 or 1: labels and weights are no mask",
            got=f"{mask[(mask != 0) & (mask != 1)][0].item()}", fix=SAMPLE,
        )  # fmt: skip
    dtypes = {state.dtype for state in states}
    if len(dtypes) > 1 or not dtypes <= set(STATES):
        raise HarnessError(
            "hidden states of a sample are of a dtype that is not read", where=path,
            rule=f"one of {', '.join(map(str, STATES))} for all of them",
            got=", ".join(sorted(map(str, dtypes))), fix=SAMPLE,
        )  # fmt: skip


def refuse_not_finite(sample: RawSample, path: Path) -> None:
    """Raises for a NaN or infinity in the first or last row: a look at a sample, not all of it."""
    ends = torch.stack([state[[0, -1]] for state in (*sample.aux, sample.final)])
    if not bool(ends.isfinite().all()):
        raise HarnessError(
            "hidden states hold a NaN or infinity", where=path,
            rule="finite numbers, looked for in the first row and the last",
            fix="extract the sample again, or remove its file",
        )  # fmt: skip
