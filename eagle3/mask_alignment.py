"""What is another program's loss mask aligned to? Read off where answers begin and end.

A mask marks the answer's tokens, or the rows that predict them. An answer begins right after the
chat template's opening of it and ends with a token that ends generation: where runs of the mask
stand by these two tells either, and a mask that slipped by a token or two.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from eagle3.errors import HarnessError
from eagle3.formats.foreign_samples import RawSample
from eagle3.formats.foreign_states import ForeignFolder

log = logging.getLogger(__name__)

Alignment = Literal["token", "prediction"]
CLEAR_SHARE = 0.9
NEAR = 4  # tokens by which a run is looked for to be early or late
# Of a run's first marked row, counted from the answer's first token; the same of its last one.
STANDS: dict[Alignment, int] = {"token": 0, "prediction": -1}


@dataclass(frozen=True)
class Runs:
    """Where runs of a mask stand.

    Attributes:
        starts: runs by how many tokens after the answer's first token they start; only of those
            that start near an opening.
        ends: the same by how many tokens after the token that ends generation they end. -1 is also
            where masks end that leave this token out, 1 where they take the template's newline in.
        count: of all runs.
    """

    starts: Counter[int]
    ends: Counter[int]
    count: int

    def share(self, alignment: Alignment) -> float:
        """Of runs that start where this alignment has them start."""
        return self.starts[STANDS[alignment]] / max(self.count, 1)

    def late(self, alignment: Alignment) -> int | None:
        """Tokens by which nearly all runs start late, if read so; None where they differ."""
        if not self.starts:
            return None
        stands, count = self.starts.most_common(1)[0]
        return stands - STANDS[alignment] if count >= CLEAR_SHARE * self.count else None


def where_runs_stand(
    samples: Sequence[RawSample], opening: Sequence[int] | None, ends: Sequence[int]
) -> Runs:
    """Looks for the opening and for an end beside every run.

    Args:
        opening: token ids with which the chat template opens an answer.
        ends: token ids that end generation.
    """
    opens = list(opening or ())
    near = sorted(range(-NEAR, NEAR + 1), key=abs)
    found = Runs(Counter(), Counter(), 0)
    for sample in samples:
        ids = sample.token_ids.tolist()
        edges = torch.nn.functional.pad(sample.loss_mask.bool().int(), (1, 1)).diff()
        firsts = (edges == 1).nonzero()[:, 0].tolist()
        lasts = ((edges == -1).nonzero()[:, 0] - 1).tolist()
        found = replace(found, count=found.count + len(firsts))
        for first, last in zip(firsts, lasts, strict=True):
            begins = [by for by in near if 0 < len(opens) <= first - by
                      and ids[first - by - len(opens) : first - by] == opens]  # fmt: skip
            stops = [by for by in near if 0 <= last - by < len(ids) and ids[last - by] in ends]
            found.starts.update(begins[:1])
            found.ends.update(stops[:1])
    return found


def find_alignment(
    samples: Sequence[RawSample],
    said: Alignment | None,
    opening: Sequence[int] | None,
    ends: Sequence[int],
    folder: ForeignFolder,
    why_not: str = "",
) -> Alignment:
    """What masks are aligned to: an answer starts right after the template's opening of it.

    A mask that is neither is believed if it is said what it is, with a warning where all of it
    stands off by the same number of tokens: only a person knows whether an answer's first tokens
    are left out on purpose. Without the opening nothing is warned of: ends alone do not tell, since
    masks with and without the end of an answer, and with the newline after it, are all in use.

    Args:
        opening, ends: as of `where_runs_stand`; no opening where no tokenizer is at hand.
        why_not: why it is not.

    Raises:
        HarnessError: it has to be said, or the data deny what was said.
    """
    runs = where_runs_stand(samples, opening, ends)
    evidence = f"{runs.starts[0]} of {runs.count} runs start after the opening of an answer, "
    evidence += f"{runs.starts[-1]} on its last token"
    if said is not None:
        other: Alignment = "prediction" if said == "token" else "token"
        if runs.share(other) >= CLEAR_SHARE:
            raise HarnessError(
                "the data deny what was said of the loss mask", where=folder.folder,
                rule=f"--mask-alignment {other}: {evidence}", got=said,
                fix="leave --mask-alignment out: the data tell",
            )  # fmt: skip
        log.info("loss mask: aligned to the %s, as said%s", said, f" ({evidence})" * bool(opening))
        if runs.late(said):
            log.warning(
                "%s: the loss mask looks shifted. Read as aligned to the %s, as said, %s; to the "
                "%s, %s. Nothing is shifted here: correct the masks, or leave them so if the first "
                "tokens of answers are left out on purpose (a thought that is always empty, say)",
                folder.folder, said, _off(runs, said), other, _off(runs, other),
            )  # fmt: skip
        return said
    for name in STANDS:
        if runs.share(name) >= CLEAR_SHARE:
            log.info("loss mask: aligned to the %s (%s)", name, evidence)
            return name
    if opening and runs.late("token") is not None:
        evidence += f"; read as aligned to the token, {_off(runs, 'token')}"
    absent = "the verifier's tokenizer is not at hand" + f": {why_not}" * bool(why_not)
    raise HarnessError(
        "what the loss mask is aligned to cannot be told from the data",
        where=folder.folder,
        rule="token (it marks answer tokens) or prediction (the rows that predict one)",
        got=evidence if opening else absent,
        fix="--mask-alignment token or --mask-alignment prediction",
    )


def _off(runs: Runs, alignment: Alignment) -> str:
    """By how much most runs are off in a reading, in words."""
    parts = []
    for verb, found in (("start", runs.starts), ("end", runs.ends)):
        for stands, count in found.most_common(1):
            by = stands - STANDS[alignment]
            how = f"{abs(by)} {'late' if by > 0 else 'early'}" if by else "in place"
            parts.append(f"{count} of {runs.count} runs {verb} {how}")
    return " and ".join(parts)
