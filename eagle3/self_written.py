"""Prompts that the verifier writes itself (Magpie, Xu et al. 2024, arXiv 2406.08464).

An instruction-tuned model that is given only its chat template's opening of a user turn goes on as
a user would. A system prompt before it, or the user's first words, steer what kind of request it
writes. What is finished of one kind is kept in a file, so that a killed run goes on with the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from tqdm import tqdm

from eagle3.chat import encode_text, user_opening
from eagle3.errors import HarnessError
from eagle3.generation import Completion, Request
from eagle3.generation_workers import Generation
from eagle3.prompts import Prompt, from_user
from eagle3.sampling import Sampling
from eagle3.settings import Settings
from eagle3.verifier import HeadConfig
from eagle3.workspace import write_json


class Kind(Settings):
    """One kind of request.

    Attributes:
        share: of all prompts, relative to the other kinds' shares.
        system: system prompt to write under, not kept with the prompt; None for the template's
            own default.
        opening: the user's first words, kept.
        keep: regular expression for the part of the writing to keep, from its start; writing
            without it is dropped. None keeps what the model ended itself, whole.
        closing: put after what is kept (the end of a code block).
        max_tokens: of a piece of writing; one that has not ended by then is dropped, unless `keep`
            finds its part in it.
    """

    name: str
    share: float = Field(gt=0)
    system: str | None = None
    opening: str = ""
    keep: str | None = None
    closing: str = ""
    max_tokens: int = Field(default=64, ge=8)


class Writing(Settings):
    """How prompts are written.

    Attributes:
        min_characters: shorter ones are dropped.
        workers: processes on a CPU, which share threads and slots (`eagle3.generation_workers`).
        slots: sequences that run at once.
    """

    kinds: list[Kind] = Field(min_length=1)
    sampling: Sampling
    min_characters: int = Field(default=20, ge=1)
    workers: int = Field(default=1, ge=1)
    slots: int = Field(default=128, ge=1)


def write_prompts(
    generate: Generation,
    tokenizer: Any,
    config: HeadConfig,
    writing: Writing,
    *,
    count: int,
    seed: int,
    work: Path,
    without: frozenset[str] = frozenset(),
) -> list[Prompt]:
    """Writes `count` distinct prompts, shared out over the kinds.

    Args:
        generate: started once there is something to write.
        work: folder for each kind's prompts; what an equal run left there is taken up.
        without: ids that must not come out (test prompts).

    Returns:
        prompts with source `self_written/<kind>`.
    """
    total = sum(kind.share for kind in writing.kinds)
    prompts: list[Prompt] = []
    with tqdm(total=count, unit="prompt", desc="prompts") as bar:
        for index, kind in enumerate(writing.kinds):
            # Cumulative rounding: the kinds' counts add up to `count`.
            share = sum(k.share for k in writing.kinds[: index + 1]) / total
            wanted = round(share * count) - len(prompts)
            finished = work / f"kind-{index:02d}.json"
            if finished.is_file():
                texts = json.loads(finished.read_text())
                prompts += [from_user(text, _source(kind)) for text in texts]
                bar.update(len(texts))
                continue
            taken = frozenset(prompt.id for prompt in prompts) | without
            own = []
            for prompt in _write_kind(
                generate, tokenizer, config, writing, kind, wanted, seed, taken
            ):
                own.append(prompt)
                bar.update()
            write_json(finished, [prompt.messages[0][1] for prompt in own])
            prompts += own
    return prompts


def _source(kind: Kind) -> str:
    return f"self_written/{kind.name}"


def _write_kind(
    generate: Generation,
    tokenizer: Any,
    config: HeadConfig,
    writing: Writing,
    kind: Kind,
    count: int,
    seed: int,
    without: frozenset[str],
) -> Iterator[Prompt]:
    before, after = user_opening(tokenizer, kind.system)
    opening = tuple(encode_text(tokenizer, before + kind.opening))
    ends = {*config.eos_token_ids, *encode_text(tokenizer, after)[:1]}
    stopping = config.model_copy(update={"eos_token_ids": sorted(ends)})
    seen = set(without)
    tries = 0
    while count > 0:
        # A quarter more than wanted, since some turns do not end or come twice.
        batch = max(16, count * 5 // 4)
        requests = [
            Request(f"{kind.name}/{tries + i}", opening, kind.max_tokens) for i in range(batch)
        ]
        tries += batch
        written = {
            done.id: done
            for done in generate(
                stopping, requests, writing.sampling, seed=seed, slots=writing.slots
            )
        }
        found: list[Prompt] = []
        for request in requests:  # in the order asked for, not in which they ended
            prompt = _accept(kind, written[request.id], tokenizer, writing.min_characters)
            if prompt is not None and prompt.id not in seen and len(found) < count:
                seen.add(prompt.id)
                found.append(prompt)
        if not found:
            raise HarnessError(
                "the verifier writes no usable prompts of a kind",
                where=f"prompts.writing.kinds: {kind.name}",
                rule=f"an ended turn of {writing.min_characters} characters or more",
                got=f"none of {batch}, such as "
                f"{tokenizer.decode(written[requests[0].id].response)[:200]!r}",
                fix="change its system prompt or opening, or allow more tokens",
            )
        count -= len(found)
        yield from found


def _accept(kind: Kind, done: Completion, tokenizer: Any, min_characters: int) -> Prompt | None:
    """The prompt in a piece of writing, or None where it is not usable."""
    ended = done.finish_reason == "stop"
    body = tokenizer.decode(done.response[:-1] if ended else done.response)
    if kind.keep is not None:
        match = re.match(kind.keep, body, re.DOTALL)
        if match is None:
            return None
        body = match.group(0)
    elif not ended:
        return None
    text = (kind.opening + body).strip() + kind.closing
    broken = "\ufffd" in text or any(token in text for token in tokenizer.all_special_tokens)
    if broken or len(body.strip()) < min_characters:
        return None
    return from_user(text, _source(kind))
