"""The report's section on the data: prompts, answers and hidden states, split by split."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section

# The stages that make each side's answers and states.
SIDES = (
    ("verifier", "regenerate", "extract"),
    ("sibling", "sibling_regenerate", "sibling_extract"),
)


def data_used(data: ReportData) -> Section | None:
    """What was asked and answered, as the stages noted it; None where none did."""
    rows = [
        row
        for side, answered, extracted in SIDES
        for row in _rows(side, data.notes(answered), data.notes(extracted))
    ]
    prompts = data.notes("prompts")
    if not rows:
        return None
    named = data.notes("verifier")
    about = " ".join(str(named[key]) for key in ("verifier", "revision") if key in named)
    body = "<p>Every answer is the answering model's own, since a drafter is to foresee its words"
    body += f": {escape(about)}.</p>" if about else ".</p>"
    body += words.table(
        ["answers of", "split", "answers", "ended by themselves", "tokens learnt from", "states"],
        rows,
        caption="Tokens learnt from: of answers alone. States: tokens whose hidden states are kept",
    )
    kinds = [
        [escape(split), words.thousands(sum(sources.values())), escape(_sources(sources))]
        for split, sources in prompts.items()
        if isinstance(sources, Mapping) and sources
    ]
    if kinds:
        body += words.folded(
            "Where the prompts come from",
            words.table(["split", "prompts", "sources"], kinds, caption=""),
        )
    return Section("data", "The data", body)


def _rows(side: str, answered: Mapping[str, Any], states: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            escape(side),
            escape(split),
            words.thousands(found["responses"]),
            words.percent(found["ended"] / found["responses"] if found["responses"] else None),
            words.thousands(found["supervised_tokens"]),
            words.thousands(states.get(split, {}).get("tokens")),
        ]
        for split, found in answered.items()
        if isinstance(found, Mapping) and "responses" in found
    ]


def _sources(sources: Mapping[str, int]) -> str:
    named = sorted(sources.items(), key=lambda item: -item[1])
    return ", ".join(f"{words.benchmark(name).rpartition('/')[2]} {count}" for name, count in named)
