"""Charts as SVG text: they take the page's colours and type, and stretch with its width.

Horizontal places are percentages and vertical ones pixels, so that letters keep their size from a
phone to a wide screen. Each chart says in words what it shows. Knows nothing of drafters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = 6  # classes c0 .. c5 of the page's style sheet


@dataclass(frozen=True)
class Bar:
    """A bar, with an interval where low and high are given. `tone` is a colour class's number."""

    label: str
    value: float
    text: str
    tone: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A line across all bars, named at its top."""

    value: float
    label: str


def bars(
    items: Sequence[Bar], *, start: float, end: float, alt: str, line: Line | None = None
) -> str:
    """Horizontal bars from `start` to `end`, each under its label and value."""
    row, bar, top = 46, 14, 24 if line else 4
    height = top + row * len(items) + 4
    parts = []
    for number, item in enumerate(items):
        y = top + row * number
        width = _percent(item.value, start, end)
        parts.append(f'<text x="0" y="{y + 14}" class="label">{escape(item.label)}</text>')
        parts.append(f'<text x="100%" y="{y + 14}" class="value">{escape(item.text)}</text>')
        parts.append(f'<rect x="0" y="{y + 22}" width="100%" height="{bar}" class="track"/>')
        parts.append(
            f'<rect x="0" y="{y + 22}" width="{width:.2f}%" height="{bar}" class="c{item.tone}"/>'
        )
        if item.low is not None and item.high is not None:
            low, high = (_percent(v, start, end) for v in (item.low, item.high))
            middle = y + 22 + bar / 2
            parts.append(stroke(low, middle, high, middle, "whisker"))
            parts += [stroke(at, middle - 6, at, middle + 6, "whisker") for at in (low, high)]
    if line is not None:
        at = _percent(line.value, start, end)
        anchor = "end" if at > 60 else "start"
        shift = "-4" if at > 60 else "4"
        parts.append(stroke(at, top - 8, at, height, "edge"))
        parts.append(
            f'<text x="{at:.2f}%" dx="{shift}" y="12" class="edge-text" '
            f'text-anchor="{anchor}">{escape(line.label)}</text>'
        )
    return svg(height, alt, parts)


def columns(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], tones: Sequence[int], *, alt: str
) -> str:
    """Groups of vertical bars for shares from 0 to 1, each with its value in percent."""
    top, plot, bottom = 18, 120, 24
    height = top + plot + bottom
    most = max((value for values in series.values() for value in values), default=0.0)
    end = max(math.ceil(most * 10) / 10, 0.1)
    step, gap = 100 / max(len(groups), 1), 3.0
    width = (step - 2 * gap) / max(len(series), 1)
    parts = [stroke(0, top + plot, 100, top + plot, "axis")]
    for index, group in enumerate(groups):
        left = index * step
        parts.append(
            f'<text x="{left + step / 2:.2f}%" y="{height - 6}" class="tick" '
            f'text-anchor="middle">{escape(group)}</text>'
        )
        for number, values in enumerate(series.values()):
            tall = plot * values[index] / end
            x = left + gap + number * width
            parts.append(
                f'<rect x="{x:.2f}%" y="{top + plot - tall:.1f}" width="{width * 0.86:.2f}%" '
                f'height="{tall:.1f}" class="c{tones[number]}"/>'
            )
            parts.append(
                f'<text x="{x + width * 0.43:.2f}%" y="{top + plot - tall - 4:.1f}" '
                f'class="tick" text-anchor="middle">{values[index] * 100:.0f}</text>'
            )
    return svg(height, alt, parts)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    tones: Sequence[int],
    *,
    x_label: str,
    alt: str,
) -> str:
    """Curves over a common x, with three marks on each axis."""
    left, right, top, plot, bottom = 13.0, 98.0, 8, 150, 36
    height = top + plot + bottom
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    x_end = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high == low:
        low, high = low - 0.5, high + 0.5
    parts = []
    for share in (0.0, 0.5, 1.0):
        value, y = low + share * (high - low), top + plot * (1 - share)
        parts.append(stroke(left, y, right, y, "grid"))
        parts.append(
            f'<text x="{left - 1.5}%" y="{y + 4:.1f}" class="tick" text-anchor="end">'
            f"{short(value)}</text>"
        )
        anchor = ("start", "middle", "end")[int(share * 2)]
        parts.append(
            f'<text x="{left + share * (right - left):.1f}%" y="{top + plot + 16}" class="tick" '
            f'text-anchor="{anchor}">{short(share * x_end)}</text>'
        )
    parts.append(
        f'<text x="{(left + right) / 2}%" y="{height - 5}" class="tick" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<svg x="{left}%" y="{top}" width="{right - left}%" height="{plot}" '
        f'viewBox="0 0 1000 1000" preserveAspectRatio="none">'
    )
    for number, values in enumerate(series.values()):
        path = " ".join(
            f"{1000 * x / x_end:.1f},{1000 * (high - y) / (high - low):.1f}" for x, y in values
        )
        parts.append(f'<polyline points="{path}" class="curve s{tones[number]}"/>')
    parts.append("</svg>")
    return svg(height, alt, parts)


def legend(names: Sequence[str], tones: Sequence[int]) -> str:
    """Names beside their colours, for the charts that follow."""
    items = "".join(
        f'<li><svg class="swatch" aria-hidden="true" width="22" height="12">'
        f'<rect width="22" height="12" rx="2" class="c{tone}"/></svg>{escape(name)}</li>'
        for name, tone in zip(names, tones, strict=True)
    )
    return f'<ul class="legend">{items}</ul>'


def thinned(points: Sequence[tuple[int, float]], most: int = 160) -> list[tuple[float, float]]:
    """Means of neighbours, so that a long noisy curve stays readable and the file small."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def svg(height: float, alt: str, parts: Sequence[str]) -> str:
    """A chart of its parts, with what it shows in words."""
    return (
        f'<svg class="chart" role="img" width="100%" height="{height}" '
        f'aria-label="{escape(alt)}"><title>{escape(alt)}</title>{"".join(parts)}</svg>'
    )


def stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line; x in percent, y in pixels."""
    return f'<line x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}" class="{kind}"/>'


def _percent(value: float, start: float, end: float) -> float:
    return 100 * min(max((value - start) / (end - start), 0.0), 1.0)


def short(value: float) -> str:
    """A number as the mark of an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1_000_000:
        return f"{value / 1_000_000:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 0.01:
        return f"{value:.3g}"
    return f"{value:.0e}".replace("e-0", "e-")
