"""Did the final states of another program go through the verifier's last norm? Read off the data.

By their length, and by which reading predicts the samples' own next tokens; which also tells rows
that belong to other tokens than they stand at.

Shape suffixes: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3.drafter import rms_norm
from eagle3.errors import HarnessError
from eagle3.formats.foreign_samples import RawSample
from eagle3.formats.foreign_states import ForeignFolder
from eagle3.logits import head_logits
from eagle3.verifier_head import VerifierHead

log = logging.getLogger(__name__)

NormState = Literal["pre_norm", "post_norm"]
PROBED_ROWS = 256
CLEAR_NATS = 0.1  # by which another alignment has to predict better to be believed
UNIT_TOLERANCE = 0.02  # of a mean square of 1: bfloat16 leaves 0.006 at hidden size 576
CLEAR_SHARE = 0.9


@dataclass(frozen=True)
class NormEvidence:
    """What the stored final states say about the last norm.

    Attributes:
        losses: mean negative log-likelihood, in nats, of the sample's own next token, if states are
            read as "pre_norm" and as "post_norm".
        unit_share: share of rows whose mean square over the norm's weights is 1. After the norm it
            is, whatever the row; before, by accident only.
        slipped: the same loss in the better-founded reading, if row t stood for token t - 1 or
            t + 1 instead.
    """

    losses: dict[NormState, float]
    unit_share: float
    slipped: dict[int, float]
    rows: int

    @property
    def after_norm(self) -> bool | None:
        """Whether states are from after the norm; None where rows are of both kinds."""
        if self.unit_share >= CLEAR_SHARE:
            return True
        return False if self.unit_share <= 1.0 - CLEAR_SHARE else None


@torch.no_grad()
def norm_evidence(
    samples: Sequence[RawSample], masks: Sequence[Tensor], head: VerifierHead
) -> NormEvidence:
    """Looks at rows that predict an answer token.

    Args:
        masks: bool [T] each, answer tokens.

    Raises:
        HarnessError: there is none.
    """
    finals, nexts = [], []
    each = -(-PROBED_ROWS // len(samples))
    for sample, mask in zip(samples, masks, strict=True):
        rows = mask[1:-1].nonzero()[:, 0][:each]
        finals.append(sample.final[rows])
        ids = sample.token_ids.long()
        nexts.append(torch.stack([ids[rows], ids[rows + 1], ids[rows + 2]], 1))
    final_NH, ids_N3 = torch.cat(finals).float(), torch.cat(nexts)
    if not len(ids_N3):
        raise HarnessError(
            "no supervised token in the first samples", where="loss masks of the samples",
            rule="a loss mask with ones",
            got=f"none that can be predicted in {len(samples)} samples",
            fix="prepare the data again: no answer is marked",
        )  # fmt: skip
    weight_H = head.norm_weight
    readings: dict[NormState, Tensor] = {
        "pre_norm": rms_norm(final_NH, weight_H, head.config.rms_norm_eps),
        "post_norm": final_NH,
    }
    losses: dict[NormState, list[float]] = {}
    for name, states_NH in readings.items():
        logits_NV = head_logits(states_NH, head)
        losses[name] = [
            torch.nn.functional.cross_entropy(logits_NV, ids_N3[:, at]).item() for at in range(3)
        ]
    safe_H = torch.where(weight_H.abs() < 1e-6, torch.ones_like(weight_H), weight_H)
    unit_N = ((final_NH / safe_H).square().mean(-1) - 1.0).abs() < UNIT_TOLERANCE
    share = float(unit_N.float().mean())
    founded: NormState = "post_norm" if share > 0.5 else "pre_norm"
    return NormEvidence(
        {name: values[1] for name, values in losses.items()},
        share,
        {-1: losses[founded][0], 1: losses[founded][2]},
        len(ids_N3),
    )


def find_norm(
    samples: Sequence[RawSample],
    masks: Sequence[Tensor],
    head: VerifierHead,
    said: NormState | None,
    folder: ForeignFolder,
) -> NormState:
    """Whether final states went through the last norm.

    By two properties of the data. After the norm every row has a mean square of 1 over the norm's
    weights; and the right reading predicts the sample's own tokens well. The first decides: greedy
    answers are predicted better by a wrong reading too, if it makes the verifier's logits larger.
    """
    found = norm_evidence(samples, masks, head)
    pre, post = found.losses["pre_norm"], found.losses["post_norm"]
    evidence = (
        f"{found.unit_share:.0%} of {found.rows} rows have the length that the norm gives; "
        f"next-token loss {pre:.3f} nats read as pre_norm, {post:.3f} as post_norm"
    )
    told = found.after_norm
    state: NormState | None = None if told is None else "post_norm" if told else "pre_norm"
    if state is not None and said not in (None, state):
        raise HarnessError(
            "the data deny what was said of the final states", where=folder.folder,
            rule=f"--final-hidden {state}: {evidence}", got=said,
            fix="leave --final-hidden out: the data tell",
        )  # fmt: skip
    chosen = said or state
    if chosen is None:
        raise HarnessError(
            "whether the final states went through the last norm cannot be told from the data",
            where=folder.folder,
            rule="rows that are all of one kind",
            got=evidence,
            fix="--final-hidden pre_norm (vLLM, speculators' workers) or post_norm (SGLang, "
            "transformers, SpecForge)",
        )
    loss = found.losses[chosen]
    _check_alignment(loss, found, chosen, head, folder)
    log.info(
        "final states: %s, %s (%s)", chosen, "as said" if said else "found from the data", evidence
    )
    return chosen


def _check_alignment(
    loss: float, found: NormEvidence, chosen: NormState, head: VerifierHead, folder: ForeignFolder
) -> None:
    """Refuses rows that belong to other tokens than they stand at, or to another verifier."""
    by, best = min(found.slipped.items(), key=lambda item: item[1])
    uniform = math.log(head.config.vocab_size)
    if loss < uniform and best > loss - CLEAR_NATS:
        return
    raise HarnessError(
        "the final states do not predict the tokens that they stand at",
        where=folder.folder,
        rule=f"a next-token loss below a blind guess ({uniform:.3f} nats), and below that of the "
        "tokens beside",
        got=f"{loss:.3f} nats read as {chosen}; {best:.3f} for the token {by:+d} from there",
        fix="another verifier, another order of states, or rows that are shifted: check how the "
        "data was extracted",
    )
