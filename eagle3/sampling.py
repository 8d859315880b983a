"""Choosing the next token from logits with one uniform number a row.

Knows no model and no generator: the caller brings the numbers, so that a sequence's draws can be
named by its id and come out the same in any batch.

Shape suffixes: N rows, V vocabulary, K candidates kept, P parts of the vocabulary, s size of one.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from eagle3.settings import Settings

# Tokens in a part of the vocabulary when the highest logit is looked for.
PART = 512
SMALLEST_PART = 64


class Sampling(Settings):
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy (argmax, the lowest id among equals).
        top_k: the k most probable tokens only; 0 keeps all.
        top_p: the smallest set of most probable tokens with at least this mass, out of those that
            `top_k` left; 1 keeps all. Without `top_k` it sorts the whole vocabulary, which is slow.
    """

    temperature: float = Field(ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


def choose(logits_NV: Tensor, uniforms_N: Tensor, sampling: Sampling) -> Tensor:
    """Draws one token a row by inverting the cumulative distribution.

    Args:
        logits_NV: any float dtype.
        uniforms_N: float32 in [0, 1); not looked at when greedy.

    Returns:
        i64[N] token ids.
    """
    if sampling.temperature == 0:
        return _first_highest(logits_NV)
    vocabulary = logits_NV.shape[-1]
    kept = min(sampling.top_k or vocabulary, vocabulary)
    candidates_NK: Tensor | None = None
    if kept < vocabulary or sampling.top_p < 1:
        logits_NV, candidates_NK = logits_NV.topk(kept, dim=-1)
    probabilities_NK = (logits_NV.float() / sampling.temperature).softmax(dim=-1)
    cumulative_NK = probabilities_NK.cumsum(dim=-1)
    if sampling.top_p < 1:
        # A token stays when the more probable ones before it fall short of the mass asked for.
        stays_NK = cumulative_NK - probabilities_NK < sampling.top_p
        cumulative_NK = (probabilities_NK * stays_NK).cumsum(dim=-1)
    # Scaled by the last entry: neither rounding nor what top_p cut off can leave a gap at the end.
    targets_N1 = uniforms_N[:, None] * cumulative_NK[:, -1:]
    chosen_N1 = torch.searchsorted(cumulative_NK, targets_N1, right=True)
    # u·total rounded up to total would point past the last candidate with any mass.
    last_N1 = torch.searchsorted(cumulative_NK, cumulative_NK[:, -1:].contiguous())
    chosen_N1 = torch.minimum(chosen_N1, last_N1)
    return (chosen_N1 if candidates_NK is None else candidates_NK.gather(1, chosen_N1))[:, 0]


def _first_highest(logits_NV: Tensor) -> Tensor:
    """argmax over V, the lowest index among equals; i64[N].

    In two steps, over equal parts of the vocabulary and within the best of them: a maximum without
    its index runs at the speed of memory, one with it at less than half of that.
    """
    rows, vocabulary = logits_NV.shape
    size = math.gcd(vocabulary, PART)
    if size < SMALLEST_PART:
        # max() takes the first of equals too, and is several times faster here than argmax().
        return logits_NV.max(dim=-1).indices
    parts_NPs = logits_NV.unflatten(-1, (-1, size))
    part_N = parts_NPs.amax(dim=-1).max(dim=-1).indices
    best_Ns = parts_NPs[torch.arange(rows, device=logits_NV.device), part_N]
    return part_N * size + best_Ns.max(dim=-1).indices
