"""How the report writes numbers and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

BENCHMARKS = {"mt_bench": "MT-bench", "human_eval": "HumanEval", "all": "all prompts"}


def benchmark(name: str) -> str:
    """A benchmark's own spelling."""
    return BENCHMARKS.get(name, name)


def arm(name: str) -> str:
    """An arm's name for people: underscores are an accident of file names."""
    return name.replace("_", " ")


def duration(seconds: float | None) -> str:
    """Seconds as 42 s, 3 min 05 s or 2 h 10 min."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def thousands(value: float | None) -> str:
    """1,234,567."""
    return "–" if value is None else f"{value:,.0f}"


def tau(value: float | None) -> str:
    """1.2345."""
    return "–" if value is None else f"{value:.4f}"


def percent(value: float | None, digits: int = 0) -> str:
    """0.123 as 12%."""
    return "–" if value is None else f"{value:.{digits}%}"


def settings(values: Mapping[str, Any]) -> str:
    """lr 0.002, objective.ttt_steps 3."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table whose cells know their column's name, so that it can fold up on a phone.

    Cells are HTML already; heads and the caption are text.
    """
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + f'<th scope="row">{row[0]}</th>'
        + "".join(
            f'<td data-label="{escape(name)}">{cell}</td>'
            for name, cell in zip(head[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def figure(title: str, note: str, chart: str, *, wide: bool = False) -> str:
    """A chart under its title and what has to be known to read it."""
    kind = " class='wide'" if wide else ""
    return (
        f"<figure{kind}><figcaption>{escape(title)} <span>{escape(note)}</span></figcaption>"
        f"{chart}</figure>"
    )


def folded(title: str, body: str) -> str:
    """Something long behind its title; printed in full."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values; values are HTML."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{items}</dl>'


def interval(estimate: Mapping[str, Any]) -> str:
    """1.42 (1.40–1.44)."""
    return f"{estimate['value']:.2f} ({estimate['low']:.2f}–{estimate['high']:.2f})"
