"""On-policy responses: what the verifier itself answers to prompts, as token ids.

Works wave by wave. A wave is a fixed set of prompts, generated as one deterministic call and kept
in one file, so a killed run redoes the wave it was in and comes to the same bytes. Knows nothing of
where prompts come from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from tqdm import tqdm

from eagle3.chat import encode_conversation, encode_prompt
from eagle3.errors import HarnessError
from eagle3.generation import (
    Completion,
    Request,
    check_fit,
    generate,
    load_for_generation,
    waves,
)
from eagle3.prompts import Prompt
from eagle3.sampling import Sampling
from eagle3.settings import Settings
from eagle3.verifier import VerifierSpec, load_tokenizer
from eagle3.workspace import write_atomically

GREEDY = Sampling(temperature=0.0)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RegenerateSettings(Settings):
    """How responses are made.

    Attributes:
        sampling: of training responses. Those of dev and test are always greedy: replay counts
            what greedy speculative decoding accepts.
        limit: training prompts to answer, the first by id; None for all.
        splits: files to make.
        max_new_tokens: of a response, its end-of-sequence token included.
        tail: unsupervised tokens after the end of dev and test responses, for drafts that engines
            count before they cut.
        keep_given: training conversations that already have answers keep them.
        slots: sequences that run at once.
        wave: prompts that a killed run may have to redo.
    """

    splits: list[Literal["train", "dev", "test"]] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)
    sampling: Sampling
    max_new_tokens: int = Field(ge=1)
    tail: int = Field(ge=0)
    keep_given: bool = False
    dtype: Literal["bfloat16", "float32"]
    slots: int = Field(ge=1)
    wave: int = Field(ge=1)


@dataclass(frozen=True)
class _Job:
    """One split's prompts, ready to run."""

    split: str
    requests: list[Request]
    given: list[dict[str, Any]]
    sources: dict[str, str]
    sampling: Sampling
    tail: int


def regenerate(
    spec: VerifierSpec,
    prompts: dict[str, list[Prompt]],
    settings: RegenerateSettings,
    *,
    seed: int,
    device: str,
    work: Path,
    out: Path,
) -> dict[str, Any]:
    """Answers every prompt and writes `<split>.jsonl` files.

    Args:
        prompts: by split.
        work: folder for finished waves; one with waves of an earlier, equal run resumes it.
        out: folder, made anew.

    Returns:
        responses, tokens and endings by split, and `seconds` and `tokens_per_s` of this process.

    Raises:
        HarnessError: no prompts, or one that does not fit the context; before the model is loaded.
    """
    tokenizer = load_tokenizer(spec)
    jobs = [
        _plan(spec, tokenizer, split, prompts.get(split, []), settings) for split in settings.splits
    ]
    total = sum(len(job.requests) for job in jobs)
    model: Any = None
    made, spent = 0, 0.0
    with tqdm(total=total, unit="prompt", desc="responses") as bar:
        for job in jobs:
            for number, wave in enumerate(waves(job.requests, settings.wave)):
                path = work / f"{job.split}-{number:05d}.jsonl"
                if path.is_file():
                    bar.update(len(wave))
                    continue
                if model is None:
                    model = load_for_generation(spec, DTYPES[settings.dtype], device)
                started, lines = time.perf_counter(), {}
                for done in generate(
                    model, spec, wave, job.sampling, seed=seed, slots=settings.slots, tail=job.tail
                ):
                    lines[done.id] = done
                    made += len(done.response) + len(done.tail)
                    rate = made / (spent + time.perf_counter() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update()
                spent += time.perf_counter() - started
                records = [_record(job, settings, seed, r, lines[r.id]) for r in wave]
                write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
    out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {job.split: _collect(job, work, out) for job in jobs}
    return facts | {
        "seconds": round(spent, 1),
        "tokens_per_s": round(made / spent, 1) if spent else None,
    }


def _plan(
    spec: VerifierSpec,
    tokenizer: Any,
    split: str,
    prompts: Sequence[Prompt],
    settings: RegenerateSettings,
) -> _Job:
    """Renders a split's prompts and checks that all of them fit."""
    if not prompts:
        raise HarnessError(f"there are no {split} prompts", fix="run the prompts stage")
    training = split == "train"
    chosen = sorted(prompts, key=lambda prompt: prompt.id)
    if training:
        chosen = chosen[: settings.limit]
    tail = 0 if training else settings.tail
    requests, given = [], []
    for prompt in chosen:
        if training and settings.keep_given and prompt.messages[-1][0] == "assistant":
            ids, runs = encode_conversation(tokenizer, prompt.as_messages(), spec.eos_token_ids)
            # A check of the length only.
            check_fit(spec, [Request(prompt.id, tuple(ids[:-1]), 1)], 0)
            given.append(
                {
                    "id": prompt.id,
                    "source": prompt.source,
                    "token_ids": ids,
                    "loss_mask": runs,
                    "finish_reason": "stop",
                    "sampling": {"given": True},
                }
            )
            continue
        ids = encode_prompt(tokenizer, prompt.question().as_messages())
        room = spec.max_position_embeddings - len(ids) - tail
        requests.append(Request(prompt.id, tuple(ids), min(settings.max_new_tokens, room)))
    check_fit(spec, requests, tail)
    sources = {prompt.id: prompt.source for prompt in chosen}
    sampling = settings.sampling if training else GREEDY
    return _Job(split, requests, given, sources, sampling, tail)


def _record(
    job: _Job, settings: RegenerateSettings, seed: int, request: Request, done: Completion
) -> dict[str, Any]:
    start = len(request.prompt)
    return {
        "id": request.id,
        "source": job.sources[request.id],
        "token_ids": [*request.prompt, *done.response, *done.tail],
        "loss_mask": [[start, start + len(done.response)]],
        "finish_reason": done.finish_reason,
        "sampling": {
            **job.sampling.model_dump(),
            "max_new_tokens": settings.max_new_tokens,
            "tail": job.tail,
            "seed": seed,
        },
    }


def _collect(job: _Job, work: Path, out: Path) -> dict[str, Any]:
    """Puts a split's waves together, by id."""
    records = list(job.given)
    for path in sorted(work.glob(f"{job.split}-*.jsonl")):
        records += [json.loads(line) for line in path.read_text().splitlines()]
    records.sort(key=lambda record: record["id"])
    text = "".join(json.dumps(record) + "\n" for record in records)
    write_atomically(out / f"{job.split}.jsonl", text)
    return {
        "responses": len(records),
        "supervised_tokens": sum(b - a for record in records for a, b in record["loss_mask"]),
        "ended": sum(record["finish_reason"] == "stop" for record in records),
    }
