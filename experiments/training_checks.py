"""What trainings outside of the pipeline refuse before any work, of data and drafters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.formats.published import read_published
from eagle3.initialise import refuse_other_layers
from eagle3.verifier_head import VerifierHead

log = logging.getLogger(__name__)

FOREIGN = (
    "data_*.pt (speculators v1), hs_*.safetensors beside an arrow data set (later speculators), or "
    "rows_*/data_*.ckpt or .ckpt.gz (SpecForge)"
)
OWN = "meta.json and shard-*.safetensors (the pipeline's own, also in train/ and dev/)"


def unknown_states(folder: Path, rule: str) -> HarnessError:
    """For a folder in which nothing is recognised; names what is in it."""
    got = "no such folder"
    if folder.is_dir():
        got = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder"
    return HarnessError(
        "no hidden states of a known format", where=folder, rule=rule, got=got,
        fix="give the folder that holds these files",
    )  # fmt: skip


def refuse_without_answers(masks: Sequence[Tensor], max_length: int) -> None:
    """Says how many samples have nothing to learn from, and refuses when none has.

    Args:
        masks: of the samples that are trained on, [T] each: answer tokens.

    Raises:
        HarnessError: no sample has an answer within `max_length` tokens.
    """
    empty = sum(
        # The first token of a sample is never drafted, and the last row has nothing to predict.
        not bool(mask[1 : min(len(mask), max_length) - 1].any())
        for mask in masks
    )
    if empty == len(masks):
        raise HarnessError(
            "nothing to learn from: no sample has an answer within the longest length read",
            where="loss mask", rule=f"supervised tokens among the first {max_length}",
            got=f"none in {len(masks)} samples",
            fix="a larger max_length (--max-seq-len), or data with answers",
        )  # fmt: skip
    if empty:
        log.warning(
            "%d of %d samples have no answer within their first %d tokens: nothing is learnt there",
            empty, len(masks), max_length,
        )  # fmt: skip


def check_drafter(
    folder: Path, head: VerifierHead, data_layers: Sequence[int] | None, said: Sequence[int] | None
) -> None:
    """Refuses a drafter that cannot be trained here, before samples are read.

    Args:
        data_layers: of the aux states, where they are known already.
        said: layers that it was trained on, where its config does not say.

    Raises:
        HarnessError: as `read_published`; weights that are no numbers; or it was trained on other
            layers.
    """
    published = read_published(folder, head, aux_layers=said)
    broken = sorted(n for n, t in published.tensors.items() if not bool(t.isfinite().all()))
    if broken:
        raise HarnessError(
            "the drafter's weights hold a NaN or infinity", where=folder, rule="finite weights",
            got=", ".join(broken[:5]), fix="another checkpoint of it",
        )  # fmt: skip
    if data_layers is not None:
        refuse_other_layers(published.config, data_layers, where=folder)
