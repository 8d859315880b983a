"""The report's section on whether the data is enough: τ by tokens, and the law through it.

Knows nothing of trainings: it draws what `eagle3 scaling` wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eagle3.report import words
from eagle3.report.charts import short, svg
from eagle3.report.data import ReportData
from eagle3.report.dots import BOTTOM, LEFT, RIGHT, TOP, across, axes
from eagle3.report.section import Section

PLOT = 190  # pixels


def scaling(data: ReportData) -> Section | None:
    """τ against the data that a training had; None where nothing was measured."""
    found = data.scaling
    if found is None:
        return None
    points: Sequence[Mapping[str, Any]] = found["points"]
    rows = [
        [
            "all data" if point["one_in"] == 1 else f"1/{point['one_in']}",
            words.thousands(point["documents"]),
            words.thousands(point["tokens"]),
            words.thousands(point["trained_tokens"]),
            f"<strong>{point['value']:.4f}</strong> ({point['low']:.4f} to {point['high']:.4f})",
        ]
        for point in points
    ]
    level = f"{found['level']:.0%}"
    body = (
        "".join(f"<p>{escape(line)}</p>" for line in found["words"])
        + words.figure(
            "τ by the data trained on",
            f"{found['prompts']} test prompts, {found['seeds']} seeds; dots: trainings; line: the "
            f"law with its {level} interval; dashed: what there is",
            _chart(found),
            wide=True,
        )
        + words.table(
            ["part of the data", "samples", "tokens", "trained on, all passes", "τ"],
            rows,
            caption=(
                f"The {words.arm(found['arm'])} recipe on nested parts, the weights best on dev "
                f"scored; {level} t-intervals over seeds, which draw parts of their own"
            ),
        )
    )
    return Section("scaling", "Is the data enough?", body)


def _chart(found: Mapping[str, Any]) -> str:
    curve, points = found["curve"], found["points"]
    dots = [(point["tokens"], value) for point in points for value in point["by_seed"]]
    heights = [item[key] for item in curve for key in ("low", "high")] + [y for _, y in dots]
    low, high = min(heights), max(heights)
    start, end = math.log(curve[0]["tokens"]), math.log(curve[-1]["tokens"])

    def place(tokens: float) -> float:
        return (math.log(tokens) - start) / (end - start)

    def down(value: float) -> float:
        return (high - value) / (high - low)

    have = points[-1]["tokens"]
    sizes = (curve[0]["tokens"], have, curve[-1]["tokens"])
    marks = [(place(tokens), short(tokens)) for tokens in sizes]
    parts = axes(low, high, marks, "tokens of data, logarithmic", plot=PLOT, digits=2)
    parts.append(
        f'<line x1="{across(place(have)):.2f}%" y1="{TOP}" x2="{across(place(have)):.2f}%" '
        f'y2="{TOP + PLOT}" class="grid" stroke-dasharray="4 4"/>'
    )
    parts.append(
        f'<svg x="{LEFT}%" y="{TOP}" width="{RIGHT - LEFT}%" height="{PLOT}" '
        f'viewBox="0 0 1000 1000" preserveAspectRatio="none">'
    )
    for key, dash in (("low", "5 5"), ("value", ""), ("high", "5 5")):
        path = " ".join(
            f"{1000 * place(item['tokens']):.1f},{1000 * down(item[key]):.1f}" for item in curve
        )
        parts.append(f'<polyline points="{path}" class="curve s0" stroke-dasharray="{dash}"/>')
    parts.append("</svg>")
    parts += [
        f'<circle cx="{across(place(x)):.1f}%" cy="{TOP + PLOT * down(y):.1f}" r="4" class="c0"/>'
        for x, y in dots
    ]
    more = "; ".join(
        f"{item['times']} times the data: {words.interval(item)}" for item in found["more"]
    )
    alt = (
        f"τ rises from {points[0]['value']:.3f} to {points[-1]['value']:.3f} with all data; {more}."
    )
    return svg(TOP + PLOT + BOTTOM, alt, parts)
