"""The report's section on the crossover map: how many tokens the head start is worth."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from eagle3.report import charts, words
from eagle3.report.colours import ARM_TONES
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def crossover(data: ReportData) -> Section | None:
    """τ against training tokens, and where training from scratch overtakes."""
    if data.crossover is None:
        return None
    found: Mapping[str, Any] = data.crossover
    curves: Mapping[str, Any] = found["curves"]
    colours = [ARM_TONES[index % len(ARM_TONES)] for index in range(len(curves))]
    series = {
        name: [(float(point["tokens"]), float(point["value"])) for point in points]
        for name, points in curves.items()
    }
    ends = ", ".join(f"{name} ends at {points[-1][1]:.3f}" for name, points in series.items())
    chart = charts.lines(
        series, colours, x_label="training tokens", alt=f"τ by training tokens: {ends}."
    )
    rows = [
        [
            f"{escape(bits)} bits",
            words.tau(about["start_tau"]),
            escape(about["words"]),
        ]
        for bits, about in found["siblings"].items()
    ]
    body = (
        charts.legend(list(curves), colours)
        + words.figure(
            f"τ on {found['prompts']} dev prompts",
            f"mean of {found['seeds']} seeds, each budget a training of its own",
            chart,
            wide=True,
        )
        + words.table(
            ["sibling rounded to", "its drafter's τ, untrained", "crossover"],
            rows,
            caption=(
                "The more bits, the nearer the sibling that the drafter was trained on lies to the "
                f"verifier. Intervals at {found['level']:.0%}, straight in log tokens between "
                "budgets"
            ),
        )
    )
    return Section("crossover", "How many tokens the head start is worth", body)
