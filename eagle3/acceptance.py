"""Acceptance counts of a drafter: one line a prompt, and the summary by benchmark.

Knows counts, not how they were made: by replay, by the local engine or by a server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from eagle3.errors import HarnessError
from eagle3.reading import read_lines
from eagle3.settings import Settings, read_settings
from eagle3.workspace import write_atomically

ALL = "all"
NGRAM = 3


class PromptCounts(Settings):
    """What verification counted on one prompt.

    Attributes:
        benchmark: the prompt's source.
        verify_steps: verification steps.
        drafted, accepted: draft tokens, k a step; accepted ones counted before any cut at the
            answer's end.
        accepted_per_position: steps that accepted the draft at position 1 .. k.
        tokens: of the answer, the one that the prefill gave included.
    """

    id: str
    benchmark: str
    verify_steps: NonNegativeInt
    drafted: NonNegativeInt
    accepted: NonNegativeInt
    accepted_per_position: list[NonNegativeInt]
    tokens: NonNegativeInt


def write_counts(path: Path, counts: Iterable[PromptCounts]) -> None:
    """Writes JSON lines, in the order given."""
    write_atomically(path, "".join(json.dumps(item.model_dump()) + "\n" for item in counts))


def read_counts(path: Path) -> list[PromptCounts]:
    """Reads JSON lines that `write_counts` wrote.

    Raises:
        HarnessError: names file and line.
    """
    if not path.is_file():
        raise HarnessError("counts are missing", where=path, fix="run the evaluate stage")
    counts = []
    for number, values in read_lines(path):
        counts.append(read_settings(PromptCounts, values, where=f"{path}:{number}"))
    if not counts:
        raise HarnessError(
            "no prompt was counted",
            where=path,
            rule="a line for each prompt",
            got="none",
            fix="run the evaluate stage again",
        )
    return counts


def by_benchmark(counts: Sequence[PromptCounts]) -> dict[str, list[PromptCounts]]:
    """Counts of each benchmark by name, and of all prompts under `ALL`."""
    names = sorted({item.benchmark for item in counts})
    groups = {name: [item for item in counts if item.benchmark == name] for name in names}
    return groups | {ALL: list(counts)}


def acceptance_length(accepted: float, steps: float) -> float:
    """τ: tokens a verification step, the bonus token included: 1 + accepted / steps.

    Sums over prompts go in, so that τ is no mean of the prompts' own. 1.0 where nothing was
    verified.
    """
    return 1.0 + accepted / steps if steps else 1.0


def unconditional_rates(accepted_per_position: Sequence[int], steps: int) -> list[float]:
    """Share of steps in which the draft at each position was accepted; non-increasing."""
    return [count / steps if steps else 0.0 for count in accepted_per_position]


def conditional_rates(accepted_per_position: Sequence[int], steps: int) -> list[float | None]:
    """Share accepted among steps in which all positions before were; None where none was."""
    before = [steps, *accepted_per_position]
    return [
        now / all_before if all_before else None
        for now, all_before in zip(accepted_per_position, before, strict=False)
    ]


def old_sglang_rate(tau: float, k: int) -> float:
    """What older SGLang printed as accept rate: (accepted + bonus) / (steps * (k + 1)).

    Its floor is 1 / (k + 1): with three drafts 25% says that nothing was accepted.
    """
    return tau / (k + 1)


def summarise(counts: Sequence[PromptCounts]) -> dict[str, Any]:
    """τ and rates of some prompts together, as plain values.

    Rates are of all steps (`unconditional`) and of the steps that accepted all drafts before
    (`conditional`, null where there was none).
    """
    steps = sum(item.verify_steps for item in counts)
    accepted = sum(item.accepted for item in counts)
    drafted = sum(item.drafted for item in counts)
    positions = [
        sum(at) for at in zip(*(item.accepted_per_position for item in counts), strict=True)
    ]
    return {
        "tau": acceptance_length(accepted, steps),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "per_position_unconditional": unconditional_rates(positions, steps),
        "per_position_conditional": conditional_rates(positions, steps),
        "verify_steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "prompts": len(counts),
        "tokens": sum(item.tokens for item in counts),
    }


def distinct_share(answers: Iterable[Sequence[int]]) -> float:
    """Distinct trigrams over all trigrams, each answer by itself, summed over answers.

    Near 0 for an answer that repeats itself, which any drafter predicts well: read τ beside it.
    1.0 where no answer has three tokens.
    """
    seen = total = 0
    for tokens in answers:
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        seen += len(set(grams))
        total += len(grams)
    return seen / total if total else 1.0
