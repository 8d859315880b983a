"""Speed of speculative against plain decoding, measured so that noise hits both alike.

The two take turns on every prompt, in one process, on one model. Knows nothing of files.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.acceptance import acceptance_length
from eagle3.decode import Clock, Decoded, Verifier
from eagle3.statistics import break_even, speed_up

WARM_UP_TOKENS = 8
REPEATS = 10


@dataclass(frozen=True)
class Run:
    """Both ways of decoding over the same prompts."""

    plain: list[Decoded]
    speculative: list[Decoded]


Decode = Callable[[int, int], Decoded]  # (number of the prompt, new tokens at most)


def take_turns(
    plain: Decode, speculative: Decode, prompts: int, max_tokens: int, *, each: Callable[[], object]
) -> Run:
    """Decodes every prompt both ways; which one is first alternates.

    Args:
        each: called after each prompt.
    """
    plain(0, WARM_UP_TOKENS)
    speculative(0, WARM_UP_TOKENS)
    run = Run([], [])
    for number in range(prompts):
        ways = [(plain, run.plain), (speculative, run.speculative)]
        for decode, results in ways if number % 2 == 0 else reversed(ways):
            results.append(decode(number, max_tokens))
        each()
    return run


def measure(run: Run, k: int) -> dict[str, Any]:
    """Speeds and costs of a run, as plain values.

    tokens_per_s counts all wall time, prompts included; `speedup_decoding` leaves prompts out, as
    the model S = τ / (r + k·c) does. r and c are means over all steps, drafting's share of taking
    in verified rows included in c.
    """
    plain_step = _ratio(
        sum(item.verify_seconds for item in run.plain),
        sum(len(item.token_ids) - 1 for item in run.plain),
    )
    steps = sum(item.verify_steps for item in run.speculative)
    verify = _ratio(sum(item.verify_seconds for item in run.speculative), steps)
    draft = _ratio(sum(item.draft_seconds for item in run.speculative), k * steps)
    r, c = _ratio(verify, plain_step), _ratio(draft, plain_step)
    tau = acceptance_length(sum(item.accepted for item in run.speculative), steps)
    speeds = [
        _ratio(sum(len(item.token_ids) for item in way), sum(item.seconds for item in way))
        for way in (run.plain, run.speculative)
    ]
    decoding = [
        _ratio(
            sum(len(item.token_ids) - 1 for item in way),
            sum(item.verify_seconds + item.draft_seconds for item in way),
        )
        for way in (run.plain, run.speculative)
    ]
    return {
        "plain_tokens_per_s": speeds[0],
        "speculative_tokens_per_s": speeds[1],
        "speedup": _ratio(speeds[1], speeds[0]),
        "speedup_decoding": _ratio(decoding[1], decoding[0]),
        "tau": tau,
        "plain_step_seconds": plain_step,
        "r": r,
        "c": c,
        "break_even_tau": break_even(r, c, k),
        "predicted_speedup": speed_up(tau, r, c, k) if r else 0.0,
    }


def verify_costs(
    verifier: Verifier, prompt_ids: Sequence[int], k: int, clock: Clock
) -> list[float]:
    """Time to verify 1 .. k drafts over the time to decode one token: medians, taken in turns."""
    verifier.reset()
    prompt = torch.tensor(prompt_ids, device=verifier.device)
    verifier.forward(prompt, 1)
    length = verifier.length
    seconds: dict[int, list[float]] = {rows: [] for rows in range(1, k + 2)}
    for _ in range(REPEATS):
        for rows, taken in seconds.items():
            started = clock()
            # The argmax waits for the result on devices that run ahead, as decoding does.
            verifier.forward(prompt[:1].expand(rows), rows).logits_MV.argmax(-1).tolist()
            taken.append(clock() - started)
            verifier.crop(length)
    one, *more = (statistics.median(taken) for taken in seconds.values())
    return [item / one for item in more]


def clock_of(device: torch.device) -> Clock:
    """A clock that waits for the device."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0
