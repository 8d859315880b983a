"""Under which convention was a drafter trained? The one under which its drafts are best.

Its own config may say nothing, or something wrong: it is a claim among others. The search goes by
what the first two drafts cost, in nats, which moves where τ does not yet; from the best common
convention it changes one thing at a time while that makes drafts cheaper by more than chance would.
τ by replay is told of every reading. Knows no command line.

Legend: N packed rows, R counted rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from eagle3.acceptance import old_sglang_rate, summarise
from eagle3.drafter import Drafter
from eagle3.extraction.base import default_layers
from eagle3.mistakes import best_tokens, mistakes, target_states
from eagle3.parity import Norm
from eagle3.served_as import EMBEDDINGS, LayeredDocument, ServedAs, drafted, replayed
from eagle3.verifier_head import VerifierHead

SURE = 4.0  # standard errors by which one reading has to be better in more rows than another
PEEKING = 0.6  # see `_ahead`
SEARCHED = 4  # documents; a claim is judged by all that are given, and τ is told of all
ROUNDS = 4  # passes over all that can be changed
ORDERS = 4  # aux layers up to which every order is tried


@dataclass(frozen=True)
class ReadingScore:
    """One reading: τ, what older SGLang would print, and what drafts cost in nats."""

    name: str
    convention: ServedAs
    tau: float
    old_sglang_rate: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found out about a drafter.

    Attributes:
        found: the reading under which its drafts are best.
        scores: readings told of, the found one first.
        targets: share of first drafts that are the token named by targets of each kind: "right",
            "without the last norm", "last norm twice".
        words: the verdict, sentence by sentence.
    """

    found: ServedAs
    scores: list[ReadingScore]
    targets: dict[str, float]
    words: list[str]


class _Search:
    """Losses of conventions over the same documents, each computed once."""

    def __init__(
        self, drafter: Drafter, layered: Sequence[LayeredDocument], dtype: torch.dtype
    ) -> None:
        self._drafter, self._layered, self._dtype = drafter, layered, dtype
        self._known: dict[ServedAs, Tensor] = {}

    def losses_R(self, convention: ServedAs) -> Tensor:
        if convention not in self._known:
            some = (self._layered[i : i + SEARCHED] for i in range(0, len(self._layered), SEARCHED))
            drafts = [drafted(self._drafter, one, convention, dtype=self._dtype) for one in some]
            self._known[convention] = torch.cat([one.loss_R for one in drafts])
        return self._known[convention]

    def loss(self, convention: ServedAs) -> float:
        return float(self.losses_R(convention).mean())

    def gain(self, better: ServedAs, worse: ServedAs) -> float:
        """Rows in which `better` costs less, over those in which it costs more, in standard errors.

        Signs, not means: a few rows that cost a fortune would hide what all others say.
        """
        apart_R = self.losses_R(worse) - self.losses_R(better)
        return float(apart_R.sign().sum()) / len(apart_R) ** 0.5


def investigate(
    drafter: Drafter,
    layered: Sequence[LayeredDocument],
    head: VerifierHead,
    norm: Norm,
    said: ServedAs | None,
    *,
    k: int,
    dtype: torch.dtype,
) -> Finding:
    """Names the convention of a drafter.

    Args:
        drafter: its `config.aux_layers` count only by their number.
        layered: documents of the verifier that it drafts for, with the states of all layers.
        said: what its config says, if it names layers.
    """
    layers = head.config.num_hidden_layers
    search = _Search(drafter, layered[:SEARCHED], dtype)
    starts = _starts(said, len(drafter.config.aux_layers), layers)
    best = min(starts, key=search.loss)
    for number in range(ROUNDS):
        before = best
        for others in _variants(best, drafter):
            other = min(others, key=search.loss)
            if search.gain(other, best) > SURE:
                best = other
        reach = layers if not number else 1
        for others in _layer_changes(best, layers, reach):
            best = min([best, *others], key=search.loss)
        if best == before:
            break
    # Few documents find the way; whether a claim holds is asked of all of them.
    judged = _Search(drafter, layered, dtype)
    if said is not None:
        best = _as_said_where_it_does_not_matter(best, said, judged, layers)

    def tau(convention: ServedAs) -> float:
        return summarise(replayed(drafter, layered, convention, k, dtype=dtype))["tau"]

    best = _ahead(best, search, tau)
    unsure = []  # parts with another value of which its drafts are as good, within chance
    for slot in range(len(best.aux_layers)):
        near = [_with_layer(best, slot, best.aux_layers[slot] + step) for step in (-1, 1)]
        near = [other for other in near if max(other.aux_layers) < layers]
        if any(abs(judged.gain(best, other)) <= SURE for other in near):
            unsure.append(f"aux[{slot}]")
    config = drafter.config.model_copy(update=dict(best.switches))
    told = [("found", best)]
    told += [("as its config says", said)] if said is not None and said != best else []
    told += [(item.name, item.convention) for item in mistakes(best, config, layers)[1:]]
    scores = []
    for name, convention in told:
        value = tau(convention)
        shown = old_sglang_rate(value, k)
        scores.append(ReadingScore(name, convention, value, shown, search.loss(convention)))
    targets = _targets(drafter, layered, best, head, norm, dtype)
    return Finding(
        found=best,
        scores=scores,
        targets=targets,
        words=_words(said, best, scores, unsure, targets, drafter),
    )


def _starts(said: ServedAs | None, count: int, layers: int) -> list[ServedAs]:
    """Common choices of layers, as said, one up and one down, in every order."""
    sets = {said.aux_layers} if said is not None else set()
    if count == 3:
        sets.add(tuple(default_layers(layers)))
    if not sets:
        sets.add(tuple(round((i + 1) * (layers - 2) / (count + 1)) for i in range(count)))
    sets |= {tuple(layer + step for layer in some) for some in sets for step in (-1, 1)}
    usable = [s for s in sorted(sets) if all(EMBEDDINGS <= layer < layers for layer in s)]
    base = said or ServedAs(aux_layers=usable[0])
    orders = [
        order for some in usable for order in (permutations(some) if count <= ORDERS else [some])
    ]
    return [replace(base, aux_layers=tuple(order)) for order in orders]


def _variants(best: ServedAs, drafter: Drafter) -> list[list[ServedAs]]:
    """What else than layers could differ, thing by thing."""
    config = drafter.config.model_copy(update=dict(best.switches))
    return [
        [best.switched("norm_before_residual", not config.norm_before_residual)],
        [best.switched("norm_output", not config.norm_output)],
        [replace(best, shift=shift) for shift in (-1, 0) if shift != best.shift],
        [replace(best, rope=not best.rope)],
    ]


def _layer_changes(best: ServedAs, layers: int, reach: int) -> list[list[ServedAs]]:
    """Other layers in each slot, up to `reach` away, and other orders."""
    changes = []
    for slot, own in enumerate(best.aux_layers):
        near = range(max(EMBEDDINGS, own - reach), min(layers, own + reach + 1))
        changes.append([_with_layer(best, slot, k) for k in near if k != own])
    if len(best.aux_layers) <= ORDERS:
        orders = permutations(best.aux_layers)
        changes.append([replace(best, aux_layers=o) for o in orders if o != best.aux_layers])
    return [some for some in changes if some]


def _ahead(best: ServedAs, search: _Search, tau: Callable[[ServedAs], float]) -> ServedAs:
    """The same fed the states of a later token, where that is what it was trained on.

    Such a state knows the token that is to be drafted: any drafter may gain from it, whatever it
    was trained on. One that was trained on it is lost without: it accepts less than a share
    `PEEKING` of what it does with it.
    """
    later = min((replace(best, shift=shift) for shift in (1, 2)), key=search.loss)
    if search.gain(later, best) > SURE and tau(best) - 1 < PEEKING * (tau(later) - 1):
        return later
    return best


def _as_said_where_it_does_not_matter(
    best: ServedAs, said: ServedAs, search: _Search, layers: int
) -> ServedAs:
    """A layer that drafts hardly depend on is taken to be the one that the config names.

    If the claim does not hold, all its layers one off are likelier than any other: two programs
    count layers from different places.
    """
    if search.gain(best, said) <= SURE:
        return said
    for step in (-1, 1):
        moved = tuple(layer + step for layer in said.aux_layers)
        other = replace(best, aux_layers=moved)
        usable = all(EMBEDDINGS <= layer < layers for layer in moved)
        if usable and search.gain(best, other) <= SURE:
            return other
    for slot, layer in enumerate(said.aux_layers):
        other = _with_layer(best, slot, layer)
        if search.gain(best, other) <= SURE:
            best = other
    return best


def _with_layer(convention: ServedAs, slot: int, layer: int) -> ServedAs:
    layers = list(convention.aux_layers)
    layers[slot] = max(layer, EMBEDDINGS)
    return replace(convention, aux_layers=tuple(layers))


def _targets(
    drafter: Drafter,
    layered: Sequence[LayeredDocument],
    best: ServedAs,
    head: VerifierHead,
    norm: Norm,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Which targets the drafts imitate: those that name the token that is drafted."""
    found = drafted(drafter, layered, best, dtype=dtype)
    shares = {}
    for name, norms in (("right", 1), ("without the last norm", 0), ("last norm twice", 2)):
        named_N = torch.cat(
            [best_tokens(target_states(item, norms, norm), head) for item in layered]
        )
        shares[name] = float((named_N[found.place_R - 1] == found.first_R).float().mean())
    return shares


def _words(
    said: ServedAs | None,
    best: ServedAs,
    scores: Sequence[ReadingScore],
    unsure: Sequence[str],
    targets: dict[str, float],
    drafter: Drafter,
) -> list[str]:
    lines = [f"Its drafts are best under: {describe(best, drafter)}."]
    if said is None:
        lines.append("Its config does not say which layers it reads.")
    elif said == best:
        lines.append("That is what its config says.")
    else:
        other = next(score for score in scores if score.convention == said)
        lines.append(
            f"Its config says otherwise: {describe(said, drafter)}. Served so, tau is "
            f"{other.tau:.3f} instead of {scores[0].tau:.3f}, and older SGLang would print "
            f"{other.old_sglang_rate:.0%}."
        )
    if unsure:
        lines.append(
            f"It hardly cares for {', '.join(unsure)}: the layer beside would do, within chance."
        )
    likeliest = max(targets, key=lambda name: targets[name])
    if likeliest != "right" and targets[likeliest] > 1.1 * targets["right"]:
        lines.append(
            f"It learnt wrong targets, of a final state {likeliest}: its drafts are what those "
            f"name in {targets[likeliest]:.0%} of the rows, and the verifier's own token in "
            f"{targets['right']:.0%}. No setting of a server mends that: train it again."
        )
    if scores[0].loss > math.log(len(drafter.d2t)):
        lines.append("Under no reading are its drafts better than guesses: another verifier's?")
    return lines


def describe(convention: ServedAs, drafter: Drafter) -> str:
    """A convention in words."""
    names = ["embeddings" if layer == EMBEDDINGS else str(layer) for layer in convention.aux_layers]
    parts = [f"outputs of layers {', '.join(names)}"]
    if convention.shift:
        parts.append(f"row t fed the states of token t {convention.shift:+d}")
    config: Any = drafter.config.model_copy(update=dict(convention.switches))
    parts += [
        f"{name} {str(getattr(config, name)).lower()}"
        for name in ("norm_before_residual", "norm_output")
    ]
    if not convention.rope:
        parts.append("no rotary positions")
    return ", ".join(parts)
