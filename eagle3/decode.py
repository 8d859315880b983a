"""Plain and speculative decoding of one sequence, as functions with their statistics.

A step of speculative decoding: the drafter proposes a chain of k tokens, the verifier runs the last
token and the drafts at once, the drafts that it agrees with are kept, and the row after the last of
them gives one more token. The output is what plain decoding gives: the same tokens when greedy,
the same distribution when sampling (Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et
al., https://arxiv.org/abs/2302.01318). Knows nothing of transformers, of prompts' texts or files.

Shape suffixes: N rows, M rows with logits, k drafts, V vocabulary, n aux layers, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """What the verifier computed: logits of the last M of N new rows, aux states of all N."""

    logits_MV: Tensor
    aux_NLH: Tensor


class Verifier(Protocol):
    """A causal LM with a cache that can be cropped; `eagle3.cached_verifier` has one."""

    @property
    def length(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def reset(self) -> None: ...

    def forward(self, token_ids_N: Tensor, logits_rows: int) -> Rows:
        """Appends tokens.

        Args:
            token_ids_N: i64, the tokens that follow what is in the cache.
            logits_rows: M; of how many of the last rows the logits are wanted.

        Returns:
            Rows: logits f[M, V], aux f[N, n, H], in the verifier's dtype unless said otherwise.
        """

    def crop(self, length: int) -> None: ...


@dataclass(frozen=True)
class Drafts:
    """A proposed chain.

    Attributes:
        token_ids_k: i64[k], ids of the verifier's vocabulary.
        probs_kV: f32[k, V], the distributions that the drafts were sampled from; None for drafts
            chosen by argmax.
    """

    token_ids_k: Tensor
    probs_kV: Tensor | None = None


class Proposer(Protocol):
    """What proposes drafts; `eagle3.chain` has EAGLE-3's."""

    def reset(self) -> None: ...

    def observe(self, next_ids_N: Tensor, aux_NLH: Tensor) -> None:
        """Takes newly verified rows: aux states of each row and the token that follows it."""

    def propose(self, k: int) -> Drafts: ...


@dataclass
class Decoded:
    """A decoded sequence and what it took.

    Attributes:
        token_ids: the new tokens, cut after the first EOS and at `max_tokens`.
        verify_steps: steps after the prompt: of plain decoding one a token, without the first.
        drafted, accepted: draft tokens proposed and accepted in all steps, before any cut.
        accepted_per_position: [k]; how many steps accepted at least i + 1 drafts.
        accepted_per_step: accepted drafts of each step.
        prefill_seconds: verifier and drafter over the prompt.
        verify_seconds, draft_seconds: all steps' shares; `verify_seconds` holds all of a plain
            step.
    """

    token_ids: list[int] = field(default_factory=list)
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall time, the prompt included."""
        return self.prefill_seconds + self.verify_seconds + self.draft_seconds


Clock = Callable[[], float]


def plain_decode(
    verifier: Verifier,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    clock: Clock = time.perf_counter,
) -> Decoded:
    """Decodes token by token.

    Args:
        max_tokens: new tokens at most.
        eos_ids: tokens after which decoding stops; the first one is kept.
        temperature: 0 is greedy; otherwise tokens are drawn, with `generator`, from
            softmax(logits / temperature).
        clock: seconds; on a device that runs ahead, one that waits for it.
    """
    done = Decoded()
    verifier.reset()
    started = clock()
    rows = verifier.forward(_ids(prompt_ids, verifier), 1)
    token = choose(rows.logits_MV[-1], temperature, generator)
    done.token_ids.append(token)
    done.prefill_seconds = clock() - started
    started = clock()
    while token not in eos_ids and len(done.token_ids) < max_tokens:
        rows = verifier.forward(_ids([token], verifier), 1)
        token = choose(rows.logits_MV[-1], temperature, generator)
        done.token_ids.append(token)
        done.verify_steps += 1
    done.verify_seconds = clock() - started
    return done


def speculative_decode(
    verifier: Verifier,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    *,
    k: int,
    max_tokens: int,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    clock: Clock = time.perf_counter,
) -> Decoded:
    """Decodes with chains of k drafts; arguments as `plain_decode`.

    Every step proposes k drafts and counts all that are accepted, also those that a cut at EOS or
    `max_tokens` then throws away. The first token comes from the prompt's own pass and is no step.
    """
    done = Decoded(accepted_per_position=[0] * k)
    verifier.reset()
    proposer.reset()
    started = clock()
    prompt = _ids(prompt_ids, verifier)
    rows = verifier.forward(prompt, 1)
    token = choose(rows.logits_MV[-1], temperature, generator)
    done.token_ids.append(token)
    proposer.observe(torch.cat([prompt[1:], _ids([token], verifier)]), rows.aux_NLH)
    now = clock()
    done.prefill_seconds = now - started
    while token not in eos_ids and len(done.token_ids) < max_tokens:
        started = now
        drafts = proposer.propose(k)
        given = torch.cat([_ids([token], verifier), drafts.token_ids_k])
        before_verifying = clock()
        start = verifier.length
        rows = verifier.forward(given, k + 1)
        accepted, token = verify(rows.logits_MV, drafts, temperature, generator)
        now = clock()
        done.draft_seconds += before_verifying - started
        done.verify_seconds += now - before_verifying

        kept = [*given[1 : accepted + 1].tolist(), token]
        done.verify_steps += 1
        done.drafted += k
        done.accepted += accepted
        done.accepted_per_step.append(accepted)
        for position in range(accepted):
            done.accepted_per_position[position] += 1
        stop = next((i + 1 for i, item in enumerate(kept) if item in eos_ids), None)
        done.token_ids += kept[:stop]
        if stop is not None:
            break
        # The rows of rejected drafts hold tokens that are not part of the sequence.
        verifier.crop(start + accepted + 1)
        if len(done.token_ids) < max_tokens:
            proposer.observe(_ids(kept, verifier), rows.aux_NLH[: accepted + 1])
            observed = clock()
            done.draft_seconds += observed - now
            now = observed
    del done.token_ids[max_tokens:]
    return done


def choose(logits_V: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """The next token from one row of logits: argmax at temperature 0, else a draw."""
    if temperature == 0:
        return int(logits_V.argmax())
    return _draw(probabilities(logits_V, temperature), generator)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, in fp32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) / temperature).softmax(-1)


def verify(
    logits_MV: Tensor, drafts: Drafts, temperature: float, generator: torch.Generator | None
) -> tuple[int, int]:
    """How many drafts hold, and the token that follows them.

    Args:
        logits_MV: f[k+1, V]; row i is the verifier's after draft i (row 0: after the last token).
    """
    if temperature == 0:
        return verify_greedy(logits_MV, drafts.token_ids_k)
    return verify_sampled(probabilities(logits_MV, temperature), drafts, generator)


def verify_greedy(logits_MV: Tensor, draft_ids_k: Tensor) -> tuple[int, int]:
    """Accepts drafts as long as each is the verifier's argmax."""
    wanted = logits_MV.argmax(-1).tolist()
    for position, draft in enumerate(draft_ids_k.tolist()):
        if draft != wanted[position]:
            return position, wanted[position]
    return len(wanted) - 1, wanted[-1]


def verify_sampled(
    probs_MV: Tensor, drafts: Drafts, generator: torch.Generator | None
) -> tuple[int, int]:
    """Accepts draft x with probability min(1, p(x)/q(x)); a rejected one is replaced by a draw from
    (p − q)+ renormalised, so that every emitted token is distributed as p.

    A draft chosen by argmax was certain, q(x) = 1: it is accepted with probability p(x), and its
    replacement drawn from p without x.
    """
    for position, draft in enumerate(drafts.token_ids_k.tolist()):
        p_V = probs_MV[position]
        q_V = None if drafts.probs_kV is None else drafts.probs_kV[position].to(p_V)
        q = 1.0 if q_V is None else float(q_V[draft])
        if _uniform(generator, p_V) * q < float(p_V[draft]):
            continue
        left_V = p_V.clone()
        if q_V is None:
            left_V[draft] = 0.0
        else:
            left_V = (left_V - q_V).clamp_(min=0.0)
        # Nothing left although rejected: p and q differ by rounding only, so p itself is right.
        return position, _draw(left_V if bool(left_V.sum() > 0) else p_V, generator)
    return len(drafts.token_ids_k), _draw(probs_MV[-1], generator)


DraftChoice = Literal["argmax", "sampled"]


def _draw(weights_V: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _uniform(generator: torch.Generator | None, like: Tensor) -> float:
    return float(torch.rand((), generator=generator, device=like.device, dtype=torch.float64))


def _ids(token_ids: Sequence[int], verifier: Verifier) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=verifier.device)
