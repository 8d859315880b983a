"""The one reading of `d2t`: which of the verifier's tokens each draft token is.

Serving engines take d2t for offsets (token = draft id + d2t); some training scripts wrote token
ids. t2d, or the values themselves, tell which. Knows tensors, not where they lie.

Shape suffixes: V verifier's vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.errors import HarnessError

SAVE_AGAIN = "take the mapping that the drafter was trained with, or build one anew from the data"


def read_map(
    d2t: Tensor, t2d: Tensor | None, vocab_size: int, *, where: object
) -> tuple[Tensor, bool]:
    """Offsets i64[D] of a d2t, and whether it held token ids.

    With t2d, the reading whose tokens are t2d's is the right one. Without, offsets are tried first,
    as engines read them; token ids are believed where offsets cannot be meant.

    Args:
        d2t: [D], whole numbers in any dtype.
        t2d: [V], whether a token is drafted; None where there is none.
        vocab_size: V of the verifier.

    Raises:
        HarnessError: t2d of another verifier; no draft token; neither reading gives each draft
            token one token of its own within the vocabulary (and t2d, if any).
    """
    if not torch.equal(d2t, d2t.long().to(d2t.dtype)):
        raise HarnessError(
            "d2t holds something else than whole numbers", where=where, rule="whole numbers",
            got=d2t.dtype, fix=SAVE_AGAIN,
        )  # fmt: skip
    d2t = d2t.reshape(-1).long()
    ids = torch.arange(len(d2t))
    readings = ((d2t, d2t + ids), (d2t - ids, d2t))
    kept = None if t2d is None else _kept(t2d, len(d2t), vocab_size, where)
    if not len(d2t):
        raise HarnessError(
            "a draft vocabulary without tokens", where=where, rule="one token or more in d2t",
            got="none", fix=SAVE_AGAIN,
        )  # fmt: skip
    within = [int(t.min()) >= 0 and int(t.max()) < vocab_size for _, t in readings]
    for held_ids, (offsets, tokens) in enumerate(readings):
        ascending = tokens.sort().values
        fits = bool((ascending.diff() > 0).all()) if kept is None else torch.equal(ascending, kept)
        if within[held_ids] and fits:
            return offsets, bool(held_ids)
    tokens = readings[0][1]
    if not any(within):
        raise HarnessError(
            "the drafter's vocabulary goes beyond the verifier's", where=where,
            rule=f"draft id + d2t from 0 to {vocab_size - 1}",
            got=f"{int(tokens.min())} to {int(tokens.max())}",
            fix="a drafter for this verifier, or the verifier of this drafter",
        )  # fmt: skip
    if kept is not None:
        raise HarnessError(
            "d2t and t2d disagree", where=where,
            rule=f"d2t names each of the {len(kept)} tokens of t2d once, as offsets or as ids",
            got=_against(tokens, kept),
            fix=SAVE_AGAIN,
        )  # fmt: skip
    # Of two readings that both fail, the one within the vocabulary is the likelier to be meant.
    raise HarnessError(
        "d2t names a token twice", where=where, rule="each draft token is a token of its own",
        got=_twice(tokens if within[0] else d2t), fix=SAVE_AGAIN,
    )  # fmt: skip


def _kept(t2d: Tensor, drafts: int, vocab_size: int, where: object) -> Tensor:
    """The tokens that t2d marks, ascending."""
    marked = t2d.reshape(-1).bool()
    kept = marked.nonzero()[:, 0]
    if len(marked) != vocab_size:
        raise HarnessError(
            "vocabulary mapping of another verifier", where=f"{where}: t2d",
            rule=f"{vocab_size} tokens", got=len(marked),
            fix="the mapping of this verifier, or the verifier of this mapping",
        )  # fmt: skip
    if not len(kept):
        raise HarnessError(
            "a vocabulary mapping without tokens", where=f"{where}: t2d",
            rule="a draft vocabulary of one token or more", got=f"{drafts} in d2t, none in t2d",
            fix=SAVE_AGAIN,
        )  # fmt: skip
    return kept


def _against(tokens: Tensor, kept: Tensor) -> str:
    said = f"{len(tokens)} tokens in d2t, {int(torch.isin(tokens, kept).sum())} of them in t2d"
    doubled = len(tokens.unique()) < len(tokens)
    return f"{said}, as offsets; {_twice(tokens)}" if doubled else f"{said}, as offsets"


def _twice(tokens: Tensor) -> str:
    values, counts = tokens.unique(return_counts=True)
    token = int(values[counts > 1][0])
    places = (tokens == token).nonzero()[:, 0].tolist()
    return (
        f"token {token} at draft ids {', '.join(map(str, places[:4]))}"
        f"{' and more' if len(places) > 4 else ''}; {int((counts > 1).sum())} such tokens"
    )
