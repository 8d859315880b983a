"""A drafter in a serving engine's real server: its counts, its speed, whether it changes the text.

The same prompts as the local engine decodes, greedily, one at a time, first by the verifier alone,
then with the drafter. Knows no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from eagle3.acceptance import (
    acceptance_length,
    distinct_share,
    old_sglang_rate,
    unconditional_rates,
)
from eagle3.decode import Decoded
from eagle3.engines.served import Answer, ServingEngine
from eagle3.errors import HarnessError
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.exactness import parting
from eagle3.local_decoding import Prompt

WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class ServedDecoding:
    """What a server answered, plainly and with the drafter, in the order of the prompts."""

    engine: str
    version: str
    dtype: str
    plain: list[Answer]
    speculative: list[Answer]


def serving_engine(
    subject: Subject, prompts: Sequence[Prompt], settings: EvaluateSettings, logs: Path
) -> ServingEngine | None:
    """The engine that the settings name; None for the local one.

    Args:
        logs: folder for the servers' logs.

    Raises:
        HarnessError: the engine is not installed, or the drafter not what it can serve.
    """
    if settings.engine == "local":
        return None
    longest = max(len(prompt.token_ids) for prompt in prompts)
    # Drafts past the limit are proposed too.
    max_length = longest + settings.decode_tokens + settings.k + 1
    dtype = settings.engine_dtype or settings.dtype
    kind: type[ServingEngine]
    if settings.engine == "sglang":
        from eagle3.engines.sglang_decoding import SGLangServing

        kind = SGLangServing
    else:
        from eagle3.engines.vllm_decoding import VllmServing

        kind = VllmServing
    engine = kind(
        settings=settings.server,
        spec=subject.spec,
        dtype=dtype,
        device=subject.device,
        k=settings.k,
        max_length=max_length,
        logs=logs,
    )
    if settings.server.urls and len(settings.server.urls) != 2:
        # One server for both would compare it with itself.
        raise HarnessError(
            "servers to compare are missing", where="evaluate.server.urls",
            rule="two: one without speculation, one with the drafter", got=settings.server.urls,
            fix="name both, or leave urls out: the stage starts its own",
        )  # fmt: skip
    engine.check(subject.checkpoint)
    return engine


def decode_served(
    engine: ServingEngine, subject: Subject, prompts: Sequence[Prompt], settings: EvaluateSettings
) -> ServedDecoding:
    """Decodes all prompts with two servers, one after the other.

    Raises:
        HarnessError: a server cannot be started, ends, or counts something that cannot be.
    """
    answers: dict[bool, list[Answer]] = {}
    version = ""
    for drafts in (False, True):
        kind = "with drafts" if drafts else "plainly"
        with engine.serve(subject.checkpoint if drafts else None) as decoder:
            version = decoder.version
            decoder.decode(prompts[0].token_ids, min(WARM_UP_TOKENS, settings.decode_tokens))
            answers[drafts] = [
                decoder.decode(prompt.token_ids, settings.decode_tokens)
                for prompt in tqdm(prompts, desc=f"{engine.name}, {kind}", unit="prompt")
            ]
    return ServedDecoding(
        engine=engine.name,
        version=version,
        dtype=settings.engine_dtype or settings.dtype,
        plain=answers[False],
        speculative=answers[True],
    )


def served_counts(
    served: ServedDecoding,
    prompts: Sequence[Prompt],
    local: Sequence[Decoded],
    k: int,
    logits_after: Callable[[Sequence[int]], Tensor],
) -> dict[str, Any]:
    """Counts of all prompts together, as plain values; nothing in it differs from run to run.

    Args:
        local: what the local engine decoded from the same prompts in fp32.
        logits_after: f64[V], the verifier's logits after the given tokens.
    """
    answers = served.speculative
    steps = sum(answer.verify_steps for answer in answers)
    accepted = sum(answer.accepted for answer in answers)
    positions = [
        sum(at) for at in zip(*(answer.accepted_per_position for answer in answers), strict=True)
    ]
    parted = [
        parting(prompt.id, prompt.token_ids, plain.token_ids, answer.token_ids, logits_after)
        for prompt, plain, answer in zip(prompts, served.plain, answers, strict=True)
    ]
    return {
        "engine": served.engine,
        "version": served.version,
        "dtype": served.dtype,
        "tau": acceptance_length(accepted, steps),
        "verify_steps": steps,
        "drafted": sum(answer.drafted for answer in answers),
        "accepted": accepted,
        "accepted_per_position": positions,
        "per_position_unconditional": unconditional_rates(positions, steps),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "distinct_trigrams": distinct_share(answer.token_ids for answer in answers),
        "old_sglang_rate": old_sglang_rate(acceptance_length(accepted, steps), k),
        "prompts": len(prompts),
        "equal_to_plain": sum(item is None for item in parted),
        "differences": [asdict(item) for item in parted if item],
        "equal_to_local": beside_local(answers, local) if served.dtype == "float32" else None,
    }


def beside_local(answers: Sequence[Answer], local: Sequence[Decoded]) -> int:
    """On how many prompts server and local engine gave the same tokens out of the same steps."""
    return sum(
        answer.token_ids == own.token_ids
        and answer.verify_steps == own.verify_steps
        and answer.accepted_per_position == own.accepted_per_position
        for answer, own in zip(answers, local, strict=True)
    )


def served_speed(served: ServedDecoding) -> dict[str, Any]:
    """Tokens a second of both servers, prompts included, at one request at a time."""
    speeds = [
        sum(len(answer.token_ids) for answer in answers) / sum(answer.seconds for answer in answers)
        for answers in (served.plain, served.speculative)
    ]
    return {
        "engine": served.engine,
        "version": served.version,
        "dtype": served.dtype,
        "plain_tokens_per_s": speeds[0],
        "speculative_tokens_per_s": speeds[1],
        "speedup": speeds[1] / speeds[0],
    }
