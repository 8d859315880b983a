"""Real decoding by the local engine: a drafter's speed, and that it changes no output.

Knows nothing of stages or of where results are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle3.acceptance import acceptance_length
from eagle3.chain import ChainProposer
from eagle3.dataset import Document
from eagle3.decode import Decoded, plain_decode, speculative_decode
from eagle3.errors import HarnessError
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.exactness import Parting, check_near_tie, parting
from eagle3.generation import Request, generate
from eagle3.lean_drafter import LeanDrafter
from eagle3.lean_verifier import decoding_verifier
from eagle3.sampling import Sampling
from eagle3.seeding import generator
from eagle3.timing import clock_of, measure, take_turns, verify_costs


@dataclass(frozen=True)
class Prompt:
    """A prompt to decode from."""

    id: str
    token_ids: list[int]


def spread_prompts(states: Sequence[Document], count: int) -> list[Prompt]:
    """Prompts for real decoding: benchmarks in turn, evenly spaced within each.

    Raises:
        HarnessError: fewer test prompts than asked for.
    """
    if len(states) < count:
        raise HarnessError(
            "fewer test prompts than are to be decoded",
            where="evaluate.decode_prompts",
            rule=f"at most {len(states)}",
            got=count,
            fix=f"set evaluate.decode_prompts to {len(states)} or fewer, or test on more prompts",
        )
    sources: dict[str, list[Document]] = {}
    for document in states:
        sources.setdefault(document.source, []).append(document)
    share = dict.fromkeys(sorted(sources), 0)
    while sum(share.values()) < count:
        for source, documents in sorted(sources.items()):
            if share[source] < len(documents) and sum(share.values()) < count:
                share[source] += 1
    chosen = []
    for source, number in share.items():
        documents = sorted(sources[source], key=lambda document: document.id)
        chosen += [documents[i * len(documents) // number] for i in range(number)]
    return [Prompt(item.id, prompt_of(item)) for item in chosen]


def prompt_of(document: Document) -> list[int]:
    """Token ids before the first supervised one."""
    start = int(document.loss_mask.nonzero()[0, 0])
    ids: list[int] = document.token_ids[:start].tolist()
    return ids


def timed_decoding(
    subject: Subject, prompts: Sequence[Prompt], settings: EvaluateSettings, *, seed: int
) -> dict[str, Any]:
    """Speed of both ways of decoding, taking turns on each prompt in one run."""
    dtype = getattr(torch, settings.dtype)
    model, drafter = subject.model(dtype), subject.drafter(dtype)
    pack = dtype == torch.bfloat16  # in float32 it would slow plain decoding down
    verifier = decoding_verifier(model, drafter.config.aux_layers, pack=pack)
    drafter = LeanDrafter(drafter, pack=pack)
    clock = clock_of(verifier.device)

    def draws(purpose: str, number: int) -> torch.Generator:
        return generator(purpose, seed, prompts[number].id, device=verifier.device)

    def plain(number: int, tokens: int) -> Decoded:
        return plain_decode(
            verifier,
            prompts[number].token_ids,
            max_tokens=tokens,
            eos_ids=subject.eos_ids,
            temperature=settings.temperature,
            generator=draws("plain", number),
            clock=clock,
        )

    def speculative(number: int, tokens: int) -> Decoded:
        proposer = ChainProposer(
            drafter,
            choice=settings.draft,
            temperature=settings.temperature or 1.0,
            generator=draws("draft", number),
        )
        return speculative_decode(
            verifier,
            proposer,
            prompts[number].token_ids,
            k=settings.k,
            max_tokens=tokens,
            eos_ids=subject.eos_ids,
            temperature=settings.temperature,
            generator=draws("verify", number),
            clock=clock,
        )

    with tqdm(total=len(prompts), desc="timed decoding", unit="prompt") as bar:
        run = take_turns(plain, speculative, len(prompts), settings.decode_tokens, each=bar.update)
    costs = verify_costs(verifier, prompts[0].token_ids, settings.k, clock)
    verifier.close()
    return {
        "k": settings.k,
        "dtype": settings.dtype,
        "temperature": settings.temperature,
        "draft": settings.draft,
        "device": subject.device,
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "max_tokens": settings.decode_tokens,
        **measure(run, settings.k),
        "verify_costs": costs,
    }


@dataclass(frozen=True)
class Exactness:
    """Greedy fp32 decoding both ways."""

    speculative: list[Decoded]
    near_ties: list[Parting]

    def summary(self) -> dict[str, Any]:
        """As plain values, without anything that differs from run to run."""
        steps = sum(item.verify_steps for item in self.speculative)
        accepted = sum(item.accepted for item in self.speculative)
        return {
            "dtype": "float32",
            "tau": acceptance_length(accepted, steps),
            "verify_steps": steps,
            "accepted": accepted,
            "accepted_per_position": [
                sum(at)
                for at in zip(*(d.accepted_per_position for d in self.speculative), strict=True)
            ],
            "tokens": sum(len(item.token_ids) for item in self.speculative),
            "exactness": {
                "prompts": len(self.speculative),
                "equal": len(self.speculative) - len(self.near_ties),
                "near_ties": [asdict(item) for item in self.near_ties],
            },
        }


def exact_decoding(
    subject: Subject, prompts: Sequence[Prompt], settings: EvaluateSettings
) -> Exactness:
    """Compares greedy speculative decoding with plain decoding, token by token, in fp32.

    The plain texts come from the engine that makes responses, all prompts in one batch: another
    cache, another attention and another loop, so that a shared fault cannot hide, and in a fraction
    of the time.

    Raises:
        HarnessError: a text differs elsewhere than at a near-tie.
    """
    model, drafter = subject.model(torch.float32), subject.drafter(torch.float32)
    requests = [Request(item.id, tuple(item.token_ids), settings.decode_tokens) for item in prompts]
    plain = {
        done.id: done.response
        for done in generate(
            model,
            subject.head.config,
            requests,
            Sampling(temperature=0.0),
            seed=0,
            slots=len(requests),
        )
    }
    verifier = decoding_verifier(model, drafter.config.aux_layers, pack=True)
    drafter = LeanDrafter(drafter, pack=True)
    decoded, ties = [], []
    logits_after = exact_logits(subject)
    for item in tqdm(prompts, desc="exactness", unit="prompt"):
        got = speculative_decode(
            verifier,
            ChainProposer(drafter),
            item.token_ids,
            k=settings.k,
            max_tokens=settings.decode_tokens,
            eos_ids=subject.eos_ids,
        )
        decoded.append(got)
        tie = parting(item.id, item.token_ids, plain[item.id], got.token_ids, logits_after)
        if tie is not None:
            check_near_tie(tie)
            ties.append(tie)
    verifier.close()
    return Exactness(decoded, ties)


def exact_logits(subject: Subject) -> Callable[[Sequence[int]], Tensor]:
    """The verifier's logits f64[V] after some tokens; it is loaded when they are first asked."""
    load = functools.lru_cache(maxsize=1)(lambda: subject.model(torch.float64))

    def logits_after(token_ids: Sequence[int]) -> Tensor:
        model: Any = load()
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=model.device)
            logits: Tensor = model(ids, logits_to_keep=1, use_cache=False).logits[0, -1]
        return logits

    return logits_after
