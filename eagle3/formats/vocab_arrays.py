"""`d2t.npy` and `t2d.npy`, the draft vocabulary of earlier training scripts.

What d2t means is `eagle3.draft_map`'s to say. Nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eagle3.draft_map import read_map
from eagle3.errors import HarnessError
from eagle3.vocab import DraftVocabulary, ordered

SAVED = "copy it again, or save it with numpy.save as one array of integers"


def read_arrays(folder: Path, size: int) -> DraftVocabulary:
    """The draft vocabulary of a folder.

    Args:
        size: of the verifier's vocabulary.

    Raises:
        HarnessError: an array is missing or no vector of whole numbers, of another verifier, or the
            two do not name the same tokens.
    """
    t2d = _array(folder, "t2d").bool()
    offsets, _ = read_map(_array(folder, "d2t"), t2d, size, where=folder)
    return ordered(DraftVocabulary(d2t=offsets, t2d=t2d), where=folder)


def _array(folder: Path, name: str) -> torch.Tensor:
    """A vector of whole numbers or booleans."""
    path = folder / f"{name}.npy"
    if not path.is_file():
        raise HarnessError(
            "no vocabulary mapping", where=folder, rule="d2t.npy and t2d.npy", got="no " + name,
            fix="correct --vocab-mapping-dir, or leave it out: a vocabulary is made from the data",
        )  # fmt: skip
    rule = "a NumPy array of one axis, whole numbers or booleans, without pickled objects"
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise HarnessError(
            "a vocabulary mapping cannot be read", where=path, rule=rule, got=error, fix=SAVED
        ) from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iub":
        got = (
            f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        )
        raise HarnessError(
            "a vocabulary mapping cannot be used", where=path, rule=rule, got=got, fix=SAVED
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))  # of any machine
