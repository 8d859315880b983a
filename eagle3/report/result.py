"""The report's first screen: one sentence, the bars, and what each arm cost."""

from __future__ import annotations

from html import escape
from typing import Any

from eagle3.report import charts, words
from eagle3.report.colours import tones
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def headline(data: ReportData) -> str:
    """The result in one sentence."""
    if data.comparison is None:
        over_seeds = (data.study or {}).get("compare") or {}
        return over_seeds.get("verdict", "No two arms have been compared yet.")
    compared, arms = data.comparison["comparison"], data.comparison["arms"]
    first, second = compared["arms"]
    tau = {arm: arms[arm]["tau"]["all"]["value"] for arm in (first, second)}
    better = compared["winner"]
    if better is None:
        better = max(tau, key=lambda arm: tau[arm])
        text = (
            f"No difference can be told between {words.arm(first)} ({tau[first]:.2f} tokens a "
            f"step) and {words.arm(second)} ({tau[second]:.2f})"
        )
        served = f"; {words.arm(better)} is"
    else:
        other = first if better == second else second
        text = (
            f"The {words.arm(better)} drafter accepts more than {words.arm(other)}: "
            f"{tau[better]:.2f} tokens a step against {tau[other]:.2f}"
        )
        served = ", and is"
    arm = arms[better]
    if "speedup" not in arm:
        return text + "."
    word = arm["against_no_speculation"]
    than = "as" if word == "about as fast" else "than"
    return f"{text}{served} {word} {than} no speculation ({arm['speedup']:.2f}×)."


def result(data: ReportData) -> Section | None:
    """Bars with intervals, the break-even line, the verdict and the cost of each arm."""
    if data.comparison is None:
        return None
    comparison: Any = data.comparison
    arms, level = comparison["arms"], f"{comparison['level']:.0%}"
    shown = [arm for arm in data.arms if arm in arms]
    colour = tones(data)
    estimates = {arm: arms[arm]["tau"]["all"] for arm in shown}
    edges = [arms[arm]["break_even_tau"] for arm in shown if "break_even_tau" in arms[arm]]
    edge = sum(edges) / len(edges) if edges else None
    most = max([item["high"] for item in estimates.values()] + ([edge] if edge else []))
    chart = charts.bars(
        [
            charts.Bar(
                words.arm(arm),
                item["value"],
                words.interval(item),
                colour[arm],
                item["low"],
                item["high"],
            )
            for arm, item in estimates.items()
        ],
        start=1.0,
        end=1.0 + (most - 1.0) * 1.08,
        line=charts.Line(edge, f"break-even {edge:.2f}") if edge else None,
        alt=_alt(estimates, edge, level),
    )
    figure = words.figure(
        "Acceptance length τ, tokens a verification step",
        f"{comparison['prompts']} test prompts, {level} intervals, bars start at 1: no draft "
        "accepted",
        chart,
        wide=True,
    )
    verdict = f"<p class='verdict'>{escape(comparison['comparison']['verdict'])}</p>"
    return Section("result", "Result", figure + verdict + _cost_table(data, shown))


def _alt(estimates: dict[str, Any], edge: float | None, level: str) -> str:
    told = "; ".join(f"{words.arm(a)} {words.interval(item)}" for a, item in estimates.items())
    line = f" Break-even at {edge:.2f}." if edge else ""
    return f"Acceptance length with {level} intervals: {told}.{line}"


def _cost_table(data: ReportData, arms: list[str]) -> str:
    assert data.comparison is not None
    results = data.comparison["arms"]
    names = [name for name in results[arms[0]]["tau"] if name != "all"]
    rows = []
    for arm in arms:
        trained, found = data.training(arm), results[arm]
        rows.append(
            [
                escape(words.arm(arm)),
                *(f"{found['tau'][name]['value']:.2f}" for name in names),
                f"{found['speedup']:.2f}×" if "speedup" in found else "–",
                escape(found.get("against_no_speculation", "–")),
                words.thousands(trained.get("tokens")),
                words.duration(trained.get("seconds")),
            ]
        )
    return words.table(
        [
            "arm",
            *(f"τ {words.benchmark(name)}" for name in names),
            "speed-up",
            "than no speculation",
            "training tokens",
            "training time",
        ],
        rows,
        caption="What each arm brings and costs",
    )
