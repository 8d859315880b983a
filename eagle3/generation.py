"""Batched generation that keeps its slots filled.

One call is a deterministic function of the model, its requests in their order and the settings:
which sequences share a forward pass depends on nothing else. Each sequence draws from a generator
named by the seed and its id. Knows nothing of prompts' text, files or resuming.

Shape suffixes: N rows, Q new tokens a row, T cached tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.logits import finish_logits
from eagle3.packed_linear import pack_linears
from eagle3.sampling import Sampling, choose
from eagle3.seeding import generator
from eagle3.verifier import HeadConfig, VerifierSpec
from eagle3.verifier_model import cache_argument, decoder_of, load_model

# Freed slots are refilled an eighth at a time: a prefill of one prompt costs nearly as much as one
# of eight, and an eighth of the batch idle for a few steps costs less.
REFILL_SHARE = 8
PREFILL_TOKENS = 2048
# Rows of a decoding step and padded prompt lengths come in multiples of this: a matrix product of
# a size not seen before has its kernel made first.
ROUNDED = 16


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    Attributes:
        id: names the sequence's draws, with the seed.
        limit: longest response, its end-of-sequence token included.
        tail: tokens to generate past the response's end, so that whoever replays speculative
            decoding can count drafts accepted before the cut.
    """

    id: str
    prompt: tuple[int, ...]
    limit: int
    tail: int = 0


@dataclass(frozen=True)
class Completion:
    """What came of a request: the response with its end-of-sequence token, and the tail."""

    id: str
    response: list[int]
    tail: list[int]
    finish_reason: str


@dataclass
class _Sequence:
    request: Request
    uniforms: list[float]
    tokens: list[int] = field(default_factory=list)
    response_length: int | None = None
    finish_reason: str = "length"


def load_for_generation(spec: VerifierSpec, dtype: torch.dtype, device: str) -> Any:
    """The verifier with its linear layers packed: for `generate` only."""
    model = load_model(spec, dtype, device)
    pack_linears(model)
    return model


@torch.inference_mode()
def generate(
    model: Any,
    config: HeadConfig,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    seed: int,
    slots: int,
) -> Iterator[Completion]:
    """Continues every request; yields in the order in which sequences end.

    Args:
        model: a loaded verifier; in use until the last completion is taken.
        seed: with a request's id, names that sequence's draws.
        slots: sequences that run at once.

    Raises:
        HarnessError: a request does not fit the verifier's context.
    """
    if not requests:
        return
    check_fit(config, requests)
    from eagle3.slot_attention import use_slot_attention

    with use_slot_attention(decoder_of(model)):
        batch = _Batch(model, config, requests, sampling, slots=min(slots, len(requests)))
        waiting = list(reversed(requests))
        while waiting or batch.running:
            free = batch.slots - len(batch.running)
            if waiting and (not batch.running or free >= max(1, batch.slots // REFILL_SHARE)):
                joining = [waiting.pop() for _ in range(min(free, len(waiting)))]
                for part in _prefill_parts(joining, batch.prefix_length):
                    batch.admit([_sequence(request, sampling, seed) for request in part])
            else:
                batch.step()
            yield from batch.collect()


def _sequence(request: Request, sampling: Sampling, seed: int) -> _Sequence:
    count = request.limit + request.tail
    if sampling.temperature == 0:
        return _Sequence(request, [0.0] * count)
    source = generator("generate", seed, request.id)
    return _Sequence(request, torch.rand(count, generator=source).tolist())


def check_fit(config: HeadConfig, requests: Sequence[Request]) -> None:
    """Raises unless every prompt with its response and tail fits the context."""
    for request in requests:
        needed = len(request.prompt) + request.limit + request.tail
        if needed > config.max_position_embeddings or request.limit < 1 or not request.prompt:
            raise HarnessError(
                "a prompt with its response does not fit the verifier's context",
                where=f"prompt {request.id}",
                rule=f"1 or more tokens, prompt and response within "
                f"{config.max_position_embeddings}",
                got=f"prompt {len(request.prompt)}, response up to {request.limit}, "
                f"tail {request.tail}",
                fix="drop or shorten that prompt, or lower max_new_tokens",
            )


def _prefill_parts(requests: Sequence[Request], prefix: int) -> Iterator[list[Request]]:
    """Splits joining requests, in order, into batches of a bounded number of padded tokens."""
    part: list[Request] = []
    longest = 0
    for request in requests:
        longest = max(longest, len(request.prompt) - prefix)
        if part and longest * (len(part) + 1) > PREFILL_TOKENS:
            yield part
            part, longest = [], len(request.prompt) - prefix
        part.append(request)
    yield part


def _rounded(count: int) -> int:
    return -(-count // ROUNDED) * ROUNDED


def _common_prefix(requests: Sequence[Request]) -> int:
    """Tokens that all prompts start with, at least one less than the shortest prompt."""
    first = requests[0].prompt
    length = min(len(request.prompt) for request in requests) - 1
    for request in requests:
        while request.prompt[:length] != first[:length]:
            length -= 1
    return length


class _Batch:
    """The running sequences: row i of every tensor and slot i of the cache is `running[i]`."""

    def __init__(
        self,
        model: Any,
        config: HeadConfig,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        slots: int,
    ) -> None:
        from eagle3.slot_cache import SlotCache

        self.config, self.sampling, self.slots = config, sampling, slots
        self.decoder, self.output = decoder_of(model), model.get_output_embeddings()
        embedding = model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.cache_name = cache_argument(self.decoder)
        self.running: list[_Sequence] = []
        self.last_N = torch.zeros(slots, dtype=torch.long)
        self.length_N = torch.zeros(slots, dtype=torch.long)
        self.cache = SlotCache(len(self.decoder.layers), slots)
        self.prefix_length = _common_prefix(requests)
        if self.prefix_length:
            prefix_1Q = torch.tensor([requests[0].prompt[: self.prefix_length]])
            self._forward(prefix_1Q, torch.zeros(1, dtype=torch.long), torch.tensor([0]))
            self.cache.share_prefix(self.prefix_length)
        self.length_N.fill_(self.prefix_length)

    def admit(self, sequences: list[_Sequence]) -> None:
        """Prefills prompts into the next free slots and draws their first tokens."""
        start = len(self.running)
        rows_N = torch.arange(start, start + len(sequences))
        bodies = [sequence.request.prompt[self.prefix_length :] for sequence in sequences]
        longest = _rounded(max(map(len, bodies)))
        ids_NQ = torch.tensor([[*body, *[0] * (longest - len(body))] for body in bodies])
        begin_N = torch.full((len(sequences),), self.prefix_length)
        ends_N = torch.tensor([len(body) for body in bodies])
        # Padding writes keys past a prompt's end; they are masked until real tokens replace them.
        hidden_NQH = self._forward(ids_NQ, begin_N, rows_N)
        hidden_NH = hidden_NQH[torch.arange(len(sequences)), ends_N.to(self.device) - 1]
        self.running += sequences
        self.length_N[rows_N] = begin_N + ends_N
        self._draw(hidden_NH, sequences, rows_N)

    def step(self) -> None:
        """One token for every running sequence."""
        count = len(self.running)
        # Rows past the last sequence write where their slot's next prompt will begin.
        padded = min(_rounded(count), self.slots)
        hidden_N1H = self._forward(
            self.last_N[:padded, None], self.length_N[:padded], torch.arange(padded), leading=True
        )
        self.length_N[:count] += 1
        self._draw(hidden_N1H[:count, 0], self.running, torch.arange(count))

    def collect(self) -> list[Completion]:
        """Takes out what has ended; the last running sequence moves into a freed slot."""
        done = []
        for slot in reversed(range(len(self.running))):
            sequence = self.running[slot]
            length = sequence.response_length
            if length is None or len(sequence.tokens) < length + sequence.request.tail:
                continue
            response, tail = sequence.tokens[:length], sequence.tokens[length:]
            done.append(Completion(sequence.request.id, response, tail, sequence.finish_reason))
            last = len(self.running) - 1
            moved = self.running.pop()
            if slot != last:
                self.running[slot] = moved
                self.cache.move(last, slot, int(self.length_N[last]))
                self.last_N[slot], self.length_N[slot] = self.last_N[last], self.length_N[last]
            self.length_N[last] = self.prefix_length
        return done

    def _draw(self, hidden_NH: Tensor, sequences: list[_Sequence], rows_N: Tensor) -> None:
        logits_NV = finish_logits(
            self.output(hidden_NH),
            scale=self.config.logit_scale,
            softcap=self.config.logit_softcap,
        )
        uniforms_N = torch.tensor([s.uniforms[len(s.tokens)] for s in sequences])
        chosen_N = choose(logits_NV, uniforms_N.to(self.device), self.sampling).cpu()
        self.last_N[rows_N] = chosen_N
        ends = self.config.eos_token_ids
        for sequence, token in zip(sequences, chosen_N.tolist(), strict=True):
            sequence.tokens.append(token)
            if sequence.response_length is None:
                if token in ends:
                    sequence.finish_reason = "stop"
                if token in ends or len(sequence.tokens) == sequence.request.limit:
                    sequence.response_length = len(sequence.tokens)

    def _forward(
        self, ids_NQ: Tensor, begin_N: Tensor, rows_N: Tensor, *, leading: bool = False
    ) -> Tensor:
        """Runs the decoder over new tokens; final states [N, Q, H]."""
        positions_NQ = begin_N[:, None] + torch.arange(ids_NQ.shape[1])
        self.cache.plan(rows_N.to(self.device), positions_NQ.to(self.device), leading=leading)
        output = self.decoder(
            input_ids=ids_NQ.to(self.device),
            attention_mask=self._mask(positions_NQ.to(self.device)),
            position_ids=positions_NQ.to(self.device),
            use_cache=True,
            **{self.cache_name: self.cache},
        )
        return output.last_hidden_state

    def _mask(self, positions_NQ: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks [N, 1, Q, T], one for each kind of attention layer the decoder has."""
        seen_T = torch.arange(self.cache.length, device=self.device)
        query_N1Q1 = positions_NQ[:, None, :, None]
        causal = seen_T <= query_N1Q1
        settings = self.decoder.config
        window = getattr(settings, "sliding_window", None) or self.cache.length
        chunk = getattr(settings, "attention_chunk_size", None) or self.cache.length
        kinds = set(getattr(settings, "layer_types", None) or ())
        masks = {"full_attention": causal}
        if "sliding_attention" in kinds or not kinds:
            masks["sliding_attention"] = causal & (seen_T > query_N1Q1 - window)
        if "chunked_attention" in kinds:
            masks["chunked_attention"] = causal & (seen_T // chunk == query_N1Q1 // chunk)
        if kinds - masks.keys():
            raise HarnessError(
                "this verifier's layers keep a state that slots cannot hold",
                where=self.config.verifier,
                rule=f"layer types among {', '.join(masks)}",
                got=", ".join(sorted(kinds - masks.keys())),
                fix="make the responses with a serving engine",
            )
        lowest = torch.finfo(self.dtype).min
        additive = {
            kind: torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, lowest)
            for kind, mask in masks.items()
        }
        if not kinds:
            return additive["sliding_attention"]
        return additive if len(kinds) > 1 else additive[kinds.pop()]
