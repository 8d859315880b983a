"""EAGLE-3's drafter as a proposer of chains: true states where there are, its own outputs beyond.

Knows nothing of the verifier that checks the drafts.

Shape suffixes: N rows, k drafts, V vocabulary, D draft vocabulary, n aux layers, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.decode import DraftChoice, Drafts, probabilities
from eagle3.drafter import DraftCache, Drafter


class ChainProposer:
    """Drafts one token after another, feeding the drafter's output back.

    Row t of its cache pairs the embedding of token t + 1 with the fused aux states of row t. Rows
    made while drafting hold the drafter's own outputs in their place and are dropped as soon as
    true states of the same rows come.

    Args:
        choice: "argmax", or "sampled" from softmax(logits / temperature) over the draft vocabulary.
        generator: for sampled drafts; another one than the verifier's, so that the draws of the
            two do not depend on each other.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        choice: DraftChoice = "argmax",
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self._drafter = drafter
        self._choice = choice
        self._temperature = temperature
        self._generator = generator
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence."""
        self._cache = DraftCache()
        self._true_rows = 0
        self._last_1H: Tensor | None = None

    @torch.inference_mode()
    def observe(self, next_ids_N: Tensor, aux_NLH: Tensor) -> None:
        """Takes N newly verified rows: their aux states and the tokens that follow them."""
        self._cache.crop(self._true_rows)
        hidden_NH = self._drafter.fuse(aux_NLH.to(self._drafter.fc.weight.dtype))
        self._last_1H = self._forward(next_ids_N, hidden_NH)[-1:]
        self._true_rows = self._cache.length

    @torch.inference_mode()
    def propose(self, k: int) -> Drafts:
        """A chain of k drafts after the last observed row.

        Raises:
            RuntimeError: nothing was observed yet.
        """
        if self._last_1H is None:
            raise RuntimeError("a proposer has to observe the prompt first")
        out_1H = self._last_1H
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(k):
            if step:
                out_1H = self._forward(ids[-1], out_1H)
            logits_1D = self._drafter.logits(out_1H)
            if self._choice == "argmax":
                draft_1 = logits_1D.argmax(-1)
            else:
                q_1D = probabilities(logits_1D, self._temperature)
                draft_1 = torch.multinomial(q_1D, 1, generator=self._generator)[0]
                probs.append(self._widened(q_1D))
            ids.append(self._drafter.target_ids(draft_1))
        return Drafts(torch.cat(ids), torch.cat(probs) if probs else None)

    def _forward(self, token_ids_N: Tensor, hidden_NH: Tensor) -> Tensor:
        start = self._cache.length
        positions_N = torch.arange(start, start + len(token_ids_N), device=token_ids_N.device)
        return self._drafter.forward_cached(token_ids_N, hidden_NH, positions_N, self._cache)

    def _widened(self, q_1D: Tensor) -> Tensor:
        """A distribution over the draft vocabulary as one over the verifier's."""
        wide_1V = q_1D.new_zeros(1, self._drafter.config.vocab_size)
        every_D = torch.arange(q_1D.shape[1], device=q_1D.device)
        wide_1V[:, self._drafter.target_ids(every_D)] = q_1D
        return wide_1V
