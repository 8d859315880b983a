"""What hidden states of other programs do not say of themselves: asked for, or read off the data.

A wrong belief here trains against wrong targets without any error. So nothing is assumed. Whether
the final state went through the last norm is told by its length, and by which reading predicts the
sample's own next tokens; what the loss mask is aligned to, by where the chat template's opening of
an answer stands. Which layers the aux states come from has to be said.

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
from eagle3.formats.foreign_samples import RawSample, refuse_not_finite
from eagle3.formats.foreign_states import ForeignFolder
from eagle3.logits import head_logits
from eagle3.settings import Settings
from eagle3.verifier_head import VerifierHead

log = logging.getLogger(__name__)

NormState = Literal["pre_norm", "post_norm"]
Alignment = Literal["token", "prediction"]
PROBED_SAMPLES, PROBED_ROWS = 32, 256
CLEAR_NATS = 0.1  # by which another alignment has to predict better to be believed
UNIT_TOLERANCE = 0.02  # of a mean square of 1: bfloat16 leaves 0.006 at hidden size 576
CLEAR_SHARE = 0.9


class Conventions(Settings):
    """What people say of a folder; None is to be found, or asked for.

    aux_layers: post-layer indices in stored order (k: the output of decoder layer k).
    final_hidden: whether the final state went through the verifier's last norm.
    mask_alignment: "token": the mask marks answer tokens; "prediction": the rows that predict one.
    padding_rows: rows at either end whose states are all zero: refuse such a sample, or drop them.
    """

    aux_layers: list[int] | None = None
    final_hidden: NormState | None = None
    mask_alignment: Alignment | None = None
    padding_rows: Literal["refuse", "drop"] = "refuse"


@dataclass(frozen=True)
class Settled:
    """The same with nothing left open."""

    aux_layers: tuple[int, ...]
    final_hidden: NormState
    mask_alignment: Alignment
    padding_rows: Literal["refuse", "drop"]


def settle(
    folder: ForeignFolder,
    head: VerifierHead,
    said: Conventions,
    opening: Sequence[int] | None,
    why_not: str = "",
) -> Settled:
    """Finds what was not said, checks what was, and logs both with their evidence.

    Args:
        opening: token ids with which the chat template opens an answer; None where the verifier's
            tokenizer is not at hand.
        why_not: why it is not.

    Raises:
        HarnessError: something has to be said, or the data deny what was said.
    """
    layers = check_layers(folder, said, folder.read(0), head)
    count = min(PROBED_SAMPLES, len(folder.paths))
    stride = max(1, len(folder.paths) // count)
    samples = [folder.read(index * stride) for index in range(count)]
    for index, sample in enumerate(samples):
        refuse_not_finite(sample, folder.paths[index * stride])
    alignment = find_alignment(samples, said.mask_alignment, opening, folder, why_not)
    masks = [token_mask(sample.loss_mask, alignment) for sample in samples]
    norm = find_norm(samples, masks, head, said.final_hidden, folder)
    return Settled(layers, norm, alignment, said.padding_rows)


def check_layers(
    folder: ForeignFolder, said: Conventions, sample: RawSample, head: VerifierHead
) -> tuple[int, ...]:
    """The layers that were named, checked against data and verifier."""
    hidden, aux = sample.final.shape[-1], len(sample.aux)
    if hidden != head.config.hidden_size:
        raise HarnessError(
            "hidden states of another verifier", where=folder.folder,
            rule=f"hidden size {head.config.hidden_size}, of {head.config.verifier}", got=hidden,
            fix="the verifier of this data, or data of this verifier",
        )  # fmt: skip
    layers = said.aux_layers
    count = head.config.num_hidden_layers
    if layers is None:
        raise HarnessError(
            "the data does not say which layers its aux states come from, and counting differs by "
            "one between engines",
            where=folder.folder,
            rule=f"{aux} post-layer indices, k for the output of decoder layer k of 0 to "
            f"{count - 1}",
            got=folder.says,
            fix="--aux-layers with the layers that the data was extracted with",
        )
    if len(layers) != aux or len(set(layers)) != aux or not all(0 <= k < count for k in layers):
        raise HarnessError(
            "the layers named do not fit the data or the verifier",
            where=f"--aux-layers, {folder.folder}",
            rule=f"{aux} different layers of 0 to {count - 1}", got=layers,
            fix="name one layer for each aux state of a sample, in stored order",
        )  # fmt: skip
    log.info("aux states: outputs of layers %s, as said (%s)", layers, folder.says)
    return tuple(layers)


def token_mask(stored: Tensor, alignment: Alignment) -> Tensor:
    """bool [T]: the token is one that the verifier answered."""
    mask = stored.bool()
    if alignment == "token":
        return mask
    return torch.cat([torch.zeros_like(mask[:1]), mask[:-1]])


def find_alignment(
    samples: Sequence[RawSample],
    said: Alignment | None,
    opening: Sequence[int] | None,
    folder: ForeignFolder,
    why_not: str = "",
) -> Alignment:
    """What masks are aligned to: an answer starts right after the template's opening of it."""
    votes = {"token": 0, "prediction": 0}
    seen = 0
    if opening:
        for sample in samples:
            mask, ids = sample.loss_mask.bool(), sample.token_ids.tolist()
            starts = (mask & ~torch.cat([torch.zeros_like(mask[:1]), mask[:-1]])).nonzero()[:, 0]
            for start in starts.tolist():
                seen += 1
                for name, end in (("token", start), ("prediction", start + 1)):
                    votes[name] += ids[max(0, end - len(opening)) : end] == list(opening)
    shares = {name: count / max(seen, 1) for name, count in votes.items()}
    evidence = f"{votes['token']} of {seen} runs start after the opening of an answer, "
    evidence += f"{votes['prediction']} on its last token"
    if said is not None:
        other: Alignment = "prediction" if said == "token" else "token"
        if shares[other] >= CLEAR_SHARE:
            raise HarnessError(
                "the data deny what was said of the loss mask", where=folder.folder,
                rule=f"--mask-alignment {other}: {evidence}", got=said,
                fix="leave --mask-alignment out: the data tell",
            )  # fmt: skip
        log.info("loss mask: aligned to the %s, as said", said)
        return said
    for name in ("token", "prediction"):
        if shares[name] >= CLEAR_SHARE:
            log.info("loss mask: aligned to the %s (%s)", name, evidence)
            return "token" if name == "token" else "prediction"
    absent = "the verifier's tokenizer is not at hand"
    why = evidence if opening else f"{absent}: {why_not}" if why_not else absent
    raise HarnessError(
        "what the loss mask is aligned to cannot be told from the data",
        where=folder.folder,
        rule="token (it marks answer tokens) or prediction (the rows that predict one)",
        got=why,
        fix="--mask-alignment token or --mask-alignment prediction",
    )


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
