"""On-policy responses: what the verifier itself answers to prompts, as token ids.

Works wave by wave. A wave is a fixed set of prompts, generated as one deterministic call and kept
in one file, so a killed run redoes the wave it was in and comes to the same bytes. Knows nothing of
where prompts come from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from tqdm import tqdm

from eagle3.chat import encode_conversation, encode_prompt, user_opening
from eagle3.errors import HarnessError
from eagle3.generation import Completion, Request, check_fit
from eagle3.generation_workers import Generation
from eagle3.prompts import Prompt
from eagle3.sampling import Sampling
from eagle3.settings import Settings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_tokenizer
from eagle3.workspace import write_atomically

GREEDY = Sampling(temperature=0.0)


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
        workers: processes on a CPU, which share threads and slots (`eagle3.generation_workers`).
        slots: sequences that run at once.
        wave: most prompts that a killed run may have to redo.
    """

    splits: list[Literal["train", "dev", "test"]] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)
    sampling: Sampling
    max_new_tokens: int = Field(ge=1)
    tail: int = Field(ge=0)
    keep_given: bool = False
    dtype: Literal["bfloat16", "float32"]
    workers: int = Field(default=1, ge=1)
    slots: int = Field(ge=1)
    wave: int = Field(ge=1)


@dataclass(frozen=True)
class _Job:
    """One split's prompts, ready to run. Requests are named `<split>/<prompt id>`."""

    split: str
    requests: list[Request]
    given: list[dict[str, Any]]
    sources: dict[str, str]
    sampling: Sampling


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
        HarnessError: a chat template that drops or changes what users say, no prompts, or one that
            does not fit the context; before the model is loaded.
    """
    tokenizer = load_tokenizer(spec)
    user_opening(tokenizer, None)  # or answers would be to something else than what was asked
    jobs = [
        _plan(spec, tokenizer, split, prompts.get(split, []), settings) for split in settings.splits
    ]
    made, spent = 0, 0.0
    dtype = getattr(torch, settings.dtype)
    with (
        Generation(spec, dtype, device, workers=settings.workers) as generate,
        tqdm(total=sum(len(job.requests) for job in jobs), unit="prompt", desc="responses") as bar,
    ):
        for path, sampling, wave in _waves(jobs, settings.wave, work):
            if path.is_file():
                bar.update(len(wave))
                continue
            generate.start()
            started, finished = time.perf_counter(), {}
            for done in generate(spec, wave, sampling, seed=seed, slots=settings.slots):
                finished[done.id] = done
                made += len(done.response) + len(done.tail)
                rate = made / (spent + time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update()
            spent += time.perf_counter() - started
            lines = [json.dumps(_record(jobs, settings, seed, r, finished[r.id])) for r in wave]
            write_atomically(path, "".join(line + "\n" for line in lines))
    out.mkdir(parents=True, exist_ok=True)
    records = [
        json.loads(line)
        for path, _, _ in _waves(jobs, settings.wave, work)
        for line in path.read_text().splitlines()
    ]
    facts: dict[str, Any] = {job.split: _write(job, records, out) for job in jobs}
    return facts | {
        "seconds": round(spent, 1),
        "tokens_per_s": round(made / spent, 1) if spent else None,
    }


def _waves(
    jobs: Sequence[_Job], size: int, work: Path
) -> Iterator[tuple[Path, Sampling, list[Request]]]:
    """Every wave with its file. Splits that are sampled alike share waves."""
    kinds: list[Sampling] = []
    for job in jobs:
        if job.sampling not in kinds:
            kinds.append(job.sampling)
    for kind, sampling in enumerate(kinds):
        requests = [r for job in jobs if job.sampling == sampling for r in job.requests]
        for number, wave in enumerate(waves(requests, size)):
            yield work / f"wave-{kind}-{number:05d}.jsonl", sampling, wave


def waves(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Cuts requests into fixed waves of like size: what a resumed run has to redo.

    Sorted by prompt length, then id: neighbours of like length waste little padding. At a wave's
    end slots stand empty, so a few large waves are faster than many small ones.
    """
    ordered = sorted(requests, key=lambda request: (len(request.prompt), request.id))
    count = -(-len(ordered) // size)
    bounds = [len(ordered) * i // count for i in range(count + 1)] if count else []
    return [ordered[start:stop] for start, stop in pairwise(bounds)]


def _plan(
    spec: VerifierSpec,
    tokenizer: Any,
    split: str,
    prompts: Sequence[Prompt],
    settings: RegenerateSettings,
) -> _Job:
    """Renders a split's prompts and checks that all of them fit."""
    if not prompts:
        raise HarnessError(
            f"there are no {split} prompts",
            where=f"prompts, split {split}",
            rule="one prompt or more",
            fix="run the prompts stage",
        )
    training = split == "train"
    chosen = sorted(prompts, key=lambda prompt: prompt.id)
    if training:
        chosen = chosen[: settings.limit]
    tail = 0 if training else settings.tail
    requests, given = [], []
    for prompt in chosen:
        if training and settings.keep_given and prompt.messages[-1][0] == "assistant":
            samples = encode_conversation(
                tokenizer,
                prompt.as_messages(),
                spec.eos_token_ids,
                prompt.as_tools(),
                where=f"prompt {prompt.id}",
            )
            for number, sample in enumerate(samples):
                # A check of the length only.
                check_fit(spec, [Request(prompt.id, tuple(sample.token_ids[:-1]), 1)])
                given.append(
                    {
                        # A template that rewrites earlier turns makes several of one.
                        "id": prompt.id if number == 0 else f"{prompt.id}.{number}",
                        "source": prompt.source,
                        "token_ids": sample.token_ids,
                        "loss_mask": sample.runs,
                        "finish_reason": "stop",
                        "sampling": {"given": True},
                    }
                )
            continue
        question = prompt.question()
        ids = encode_prompt(tokenizer, question.as_messages(), question.as_tools())
        room = spec.max_position_embeddings - len(ids) - tail
        limit = min(settings.max_new_tokens, room)
        requests.append(Request(f"{split}/{prompt.id}", tuple(ids), limit, tail))
    check_fit(spec, requests)
    sources = {prompt.id: prompt.source for prompt in chosen}
    sampling = settings.sampling if training else GREEDY
    return _Job(split, requests, given, sources, sampling)


def _record(
    jobs: Sequence[_Job],
    settings: RegenerateSettings,
    seed: int,
    request: Request,
    done: Completion,
) -> dict[str, Any]:
    """A response's line, with its split."""
    split, _, prompt_id = request.id.partition("/")
    job = next(job for job in jobs if job.split == split)
    start = len(request.prompt)
    return {
        "split": split,
        "id": prompt_id,
        "source": job.sources[prompt_id],
        "token_ids": [*request.prompt, *done.response, *done.tail],
        "loss_mask": [[start, start + len(done.response)]],
        "finish_reason": done.finish_reason,
        "sampling": {
            **job.sampling.model_dump(),
            "max_new_tokens": settings.max_new_tokens,
            "tail": request.tail,
            "seed": seed,
        },
    }


def _write(job: _Job, records: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Writes a split's file, by id."""
    own = [*job.given]
    for record in records:
        if record["split"] == job.split:
            own.append({key: value for key, value in record.items() if key != "split"})
    own.sort(key=lambda record: record["id"])
    text = "".join(json.dumps(record) + "\n" for record in own)
    write_atomically(out / f"{job.split}.jsonl", text)
    return {
        "responses": len(own),
        "supervised_tokens": sum(end - start for r in own for start, end in r["loss_mask"]),
        "ended": sum(record["finish_reason"] == "stop" for record in own),
    }
