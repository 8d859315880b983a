"""Dots over a number or over words, as SVG text in the manner of `eagle3.report.charts`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from eagle3.report.charts import short, stroke, svg

Point = tuple[float | str, float]
LEFT, RIGHT, TOP, PLOT, BOTTOM = 13.0, 96.0, 8, 130, 36  # x in percent, y in pixels


def dots(
    series: Mapping[str, Sequence[Point]],
    tones: Sequence[int],
    *,
    x_label: str,
    alt: str,
    log: bool,
) -> str:
    """One dot a point; x are numbers, or words side by side. Empty without points.

    Args:
        log: numbers are placed by their logarithm.
    """
    points = [point for values in series.values() for point in values]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high == low:
        low, high = low - 0.5, high + 0.5
    places, marks = _axis([x for x, _ in points], log)
    parts = axes(low, high, marks, x_label, plot=PLOT, digits=3)
    for number, values in enumerate(series.values()):
        for x, y in values:
            down = TOP + PLOT * (high - y) / (high - low)
            parts.append(
                f'<circle cx="{across(places[x]):.1f}%" cy="{down:.1f}" r="4.5" '
                f'class="c{tones[number]}"/>'
            )
    return svg(TOP + PLOT + BOTTOM, alt, parts)


def axes(
    low: float,
    high: float,
    marks: Sequence[tuple[float, str]],
    x_label: str,
    *,
    plot: int,
    digits: int,
) -> list[str]:
    """A grid with three values of y, and the marks of x at their places from 0 to 1.

    Args:
        plot: height between the first line and the last.
        digits: of the values.
    """
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = TOP + plot * (1 - share)
        parts.append(stroke(LEFT, y, RIGHT, y, "grid"))
        parts.append(
            f'<text x="{LEFT - 1.5}%" y="{y + 4:.1f}" class="tick" text-anchor="end">'
            f"{low + share * (high - low):.{digits}f}</text>"
        )
    for at, text in marks:
        parts.append(
            f'<text x="{across(at):.1f}%" y="{TOP + plot + 17}" class="tick" text-anchor="middle">'
            f"{escape(text)}</text>"
        )
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2}%" y="{TOP + plot + BOTTOM - 5}" class="tick" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    return parts


def _axis(
    values: Sequence[float | str], log: bool
) -> tuple[dict[float | str, float], list[tuple[float, str]]]:
    """Places from 0 to 1 by value, and the marks below them."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        words = sorted({str(value) for value in values})
        at = {word: (index + 0.5) / len(words) for index, word in enumerate(words)}
        return {value: at[str(value)] for value in values}, [(at[word], word) for word in words]
    scaled = {value: math.log(value) if log else float(value) for value in numbers}
    low, high = min(scaled.values()), max(scaled.values())
    if high == low:
        return dict.fromkeys(values, 0.5), [(0.5, short(numbers[0]))]
    places: dict[float | str, float] = {
        value: 0.04 + 0.92 * (scaled[value] - low) / (high - low) for value in numbers
    }
    ends = sorted({min(numbers), max(numbers)})
    return places, [(places[value], short(value)) for value in ends]


def across(place: float) -> float:
    """Where a place from 0 to 1 lies, in percent of the width."""
    return LEFT + place * (RIGHT - LEFT)
