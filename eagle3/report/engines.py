"""The report's section on engines side by side: the same drafter, each engine's states and counts.

Measured apart from the pipeline, by `experiments.benchmarks.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def engines(data: ReportData) -> Section | None:
    """None where nothing was measured, or on another verifier than the report's."""
    found = data.engines
    if found is None or (data.verifier is not None and found["verifier"] != data.verifier):
        return None
    rows = [_row(item) for item in found["rows"]]
    body = words.table(
        [
            "engine",
            "τ",
            "accepted at 1, 2, …",
            "steps",
            "text as without drafts",
            "states apart by",
        ],
        rows,
        caption=(
            f"Measured apart from this run: the {words.arm(found['drafter'])} drafter on "
            f"{found['verifier']} in {found['dtype']}, {found['rows'][0]['prompts']} prompts, "
            "greedily. States apart by: the largest relative error of hidden states against those "
            "that were stored"
        ),
    )
    faults = [item for item in found.get("diagnoses", []) if item["named"]]
    if faults:
        body += words.folded(
            f"Faults put into states on purpose: {len(faults)}, and how each was named",
            words.table(
                ["put in", "named"],
                [[escape(f["fault"]), "<br>".join(map(escape, f["named"]))] for f in faults],
                caption="",
            ),
        )
    return Section("engines", "Engines side by side", body)


def _row(item: Mapping[str, Any]) -> list[str]:
    local = "transformers, in this project" if item["engine"] == "local" else item["engine"]
    steps = item["verify_steps"]
    rates = [count / steps if steps else 0.0 for count in item["accepted_per_position"]]
    return [
        escape(" ".join(filter(None, (local, item.get("version"))))),
        f"{item['tau']:.3f}",
        " · ".join(words.percent(rate) for rate in rates),
        words.thousands(steps),
        "all" if item["tokens_equal"] else f"all but {len(item['differences'])}",
        f"{item['max_relative_error']:.1e}",
    ]
