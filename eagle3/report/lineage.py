"""The stages behind the numbers as a picture: what was made from what, with digests and runs.

One row a stage, each below those that it reads from. A line goes down from every stage to the last
that reads it, with a branch to each. Knows nothing of how the chain was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eagle3.report import charts
from eagle3.report.data import ReportData
from eagle3.report.section import Section

ROW, LANE, TOP = 38, 9, 6  # pixels
SHORT = 8  # letters of a digest or run id


def lineage(data: ReportData) -> Section | None:
    """From the comparison back to the verifier."""
    if not data.lineage:
        return None
    steps = list(reversed(data.lineage))
    reused = [str(step["stage"]) for step in steps if step["reused"]]
    text = (
        "<p>Each stage stands below those that it reads from. Beside it: the digest of what it "
        "made, as dvc.lock has it, and its MLflow run. <code>eagle3 lineage</code> tells the same "
        "of any checkpoint, run or number.</p>"
    )
    if reused:
        text += (
            f"<p class='note'>Taken from an earlier run, whose inputs were made again since with "
            f"equal bytes: {escape(', '.join(reused))}.</p>"
        )
    return Section("lineage", "What was made from what", text + picture(steps))


def picture(steps: Sequence[Mapping[str, Any]]) -> str:
    """SVG of the chain.

    Args:
        steps: with `stage`, `needs` (stages), `digest` and `runs`, each after those that it needs.
    """
    rows = {str(step["stage"]): number for number, step in enumerate(steps)}
    last = {name: max(_readers(steps, rows, name), default=rows[name]) for name in rows}
    lanes = _lanes(rows, last)
    gutter = LANE * (max(lanes.values(), default=0) + 2)
    parts = []
    for name, row in rows.items():
        x, start = _x(lanes[name]), _y(row)
        tone = lanes[name] % charts.COLORS
        ends = _readers(steps, rows, name)
        if ends:
            parts.append(_line(x, start, x, _y(last[name]), tone))
        parts += [_line(x, _y(end), gutter, _y(end), tone) for end in ends]
        parts.append(
            f'<rect x="{x - 3.5}" y="{start - 3.5}" width="7" height="7" rx="3.5" class="c{tone}"/>'
        )
    for step in steps:
        y = _y(rows[str(step["stage"])])
        runs = ", ".join(str(run)[:SHORT] for run in step["runs"])
        beside = str(step["digest"])[:SHORT] + (f" · run {runs}" if runs else "")
        parts.append(
            f'<text x="{gutter + 6}" y="{y + 2}" class="label">{escape(str(step["stage"]))}</text>'
        )
        parts.append(f'<text x="{gutter + 6}" y="{y + 16}" class="tick">{escape(beside)}</text>')
    told = "; ".join(
        f"{step['stage']} from {', '.join(step['needs']) or 'outside'}" for step in steps
    )
    return charts.svg(TOP + ROW * len(steps), f"What was made from what: {told}.", parts)


def _readers(steps: Sequence[Mapping[str, Any]], rows: Mapping[str, int], name: str) -> list[int]:
    return [rows[str(step["stage"])] for step in steps if name in step["needs"]]


def _lanes(rows: Mapping[str, int], last: Mapping[str, int]) -> dict[str, int]:
    """The leftmost lane that is free from a stage's row to that of its last reader."""
    free_from: list[int] = []
    lanes = {}
    for name, row in rows.items():
        lane = next((n for n, row_free in enumerate(free_from) if row_free <= row), len(free_from))
        free_from[lane : lane + 1] = [last[name] + 1]
        lanes[name] = lane
    return lanes


def _x(lane: int) -> float:
    return LANE * (lane + 0.5)


def _y(row: int) -> float:
    return TOP + ROW * row + 10


def _line(x1: float, y1: float, x2: float, y2: float, tone: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="curve s{tone}"/>'
