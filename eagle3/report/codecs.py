"""The report's section on how hidden states are stored: what 8 bits save and what they cost.

Measured apart from the pipeline, by `experiments.benchmarks.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def codecs(data: ReportData) -> Section | None:
    """One row a codec, the plain one first; None where nothing was measured."""
    found = data.codecs
    if found is None:
        return None
    rows: Sequence[Mapping[str, Any]] = found["codecs"]
    plain, others = rows[0], rows[1:]
    told = "".join(f"<p>{escape(_words(found, plain, other))}</p>" for other in others)
    table = words.table(
        ["codec", "bytes a row", "of plain", "dev τ of each seed", "difference, paired by seed"],
        [_row(row, plain, found["dtype"]) for row in rows],
        caption=(
            f"Measured apart from this run: the {words.arm(found['arm'])} recipe on states of "
            f"{found['verifier']}, {words.thousands(found['tokens'])} training tokens, "
            f"{found['seeds']} seeds each, τ by replay of {found['prompts']} dev answers on states "
            "as they lie plainly"
        ),
    )
    errors = "".join(
        words.folded(
            f"How far {other['codec']} moves a row, by state",
            words.table(
                ["state", "mean", "largest"],
                [
                    [escape(e["state"]), f"{e['mean']:.2%}", f"{e['largest']:.2%}"]
                    for e in other["errors"]
                ],
                caption="Error of dev rows, in shares of their length",
            ),
        )
        for other in others
    )
    return Section("codecs", "Hidden states in fewer bits", told + table + errors)


def _words(found: Mapping[str, Any], plain: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    share = other["bytes_per_row"] / plain["bytes_per_row"]
    errors = other["errors"]  # of equally many rows each
    mean = sum(item["mean"] for item in errors) / len(errors)
    largest = max(item["largest"] for item in errors)
    difference = other["difference"]
    if difference["low"] > 0:
        judged = "They accept more"
    elif difference["high"] < 0:
        judged = "They accept less"
    else:
        judged = "No difference can be told"
    return (
        f"In {other['codec']} states take {share:.0%} of the bytes of plain {found['dtype']}, and "
        f"a row moves by {mean:.1%} of its length on average, by {largest:.1%} at most. Dev τ of "
        f"drafters trained on them minus that of drafters trained on plain ones: "
        f"{difference['value']:+.3f} ({found['level']:.0%} interval {difference['low']:+.3f} "
        f"to {difference['high']:+.3f} over {found['seeds']} seeds). {judged}."
    )


def _row(row: Mapping[str, Any], plain: Mapping[str, Any], dtype: str) -> list[str]:
    difference = row.get("difference")
    return [
        escape(f"none: {dtype}" if row is plain else row["codec"]),
        words.thousands(row["bytes_per_row"]),
        words.percent(row["bytes_per_row"] / plain["bytes_per_row"]),
        " · ".join(f"{tau:.4f}" for tau in row["tau_by_seed"]),
        " · ".join(f"{value:+.4f}" for value in difference["by_seed"]) if difference else "–",
    ]
