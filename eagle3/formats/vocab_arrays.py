"""`d2t.npy` and `t2d.npy`, the draft vocabulary of earlier training scripts.

Some wrote d2t as offsets, some as token ids; t2d tells which. Nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eagle3.errors import HarnessError
from eagle3.vocab import DraftVocabulary


def read_arrays(folder: Path, size: int) -> DraftVocabulary:
    """The draft vocabulary of a folder.

    Args:
        size: of the verifier's vocabulary.

    Raises:
        HarnessError: an array is missing or no vector of whole numbers, of another verifier, or the
            two do not name the same tokens.
    """
    d2t = _array(folder, "d2t").long()
    t2d = _array(folder, "t2d").bool()
    targets = t2d.nonzero()[:, 0]
    if len(t2d) != size:
        raise HarnessError(
            "vocabulary mapping of another verifier", where=folder / "t2d.npy",
            rule=f"{size} tokens", got=len(t2d),
        )  # fmt: skip
    if not len(targets):
        raise HarnessError(
            "a vocabulary mapping without tokens", where=folder / "t2d.npy",
            rule="a draft vocabulary of one token or more", got=f"{len(d2t)} in d2t, none in t2d",
        )  # fmt: skip
    ids = torch.arange(len(d2t))
    for offsets in (d2t, d2t - ids):
        if torch.equal(offsets + ids, targets):
            return DraftVocabulary(d2t=offsets, t2d=t2d)
    raise HarnessError(
        "d2t and t2d disagree",
        where=folder,
        rule="d2t holds t2d's tokens in ascending order, as offsets or as token ids",
        got=f"{len(d2t)} draft tokens in d2t, {len(targets)} in t2d",
    )


def _array(folder: Path, name: str) -> torch.Tensor:
    """A vector of whole numbers or booleans."""
    path = folder / f"{name}.npy"
    if not path.is_file():
        raise HarnessError(
            "no vocabulary mapping", where=folder, rule="d2t.npy and t2d.npy", got="no " + name
        )
    rule = "a NumPy array of one axis, whole numbers or booleans, without pickled objects"
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise HarnessError(
            "a vocabulary mapping cannot be read", where=path, rule=rule, got=error
        ) from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iub":
        got = (
            f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        )
        raise HarnessError("a vocabulary mapping cannot be used", where=path, rule=rule, got=got)
    return torch.from_numpy(array)
