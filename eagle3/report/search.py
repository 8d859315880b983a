"""The report's section on the search: what each arm's trials found."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from eagle3.report import charts, words
from eagle3.report.colours import study_tones
from eagle3.report.data import ReportData
from eagle3.report.dots import dots
from eagle3.report.section import Section


def search(data: ReportData) -> Section | None:
    """What each arm's search tried and found."""
    if data.study is None:
        return None
    arms: Mapping[str, Any] = data.study["arms"]
    colours = study_tones(data, list(arms))
    rows = [
        [
            escape(words.arm(arm)),
            f"{found['trials']}, {found['pruned']} given up",
            words.tau(found["default_tau"]),
            f"<strong>{words.tau(found['best_tau'])}</strong>",
            "–" if found["best"] is None else escape(words.settings(found["best"]["params"])),
        ]
        for arm, found in arms.items()
    ]
    body = words.table(
        ["arm", "trials", "τ at first settings", "best τ", "with"],
        rows,
        caption=(
            f"Study {data.study['study']}: τ on dev answers, each trial on a budget of "
            f"{words.thousands(data.study['cost'])} supervised rows × TTT steps; "
            f"{words.duration(data.study['seconds'])} in all"
        ),
    )
    if data.study["wall_limit_reached"]:
        body += (
            "<p class='note'>The outer limit in wall time ended the search: which trials it holds "
            "is no matter of settings and seed alone.</p>"
        )
    body += charts.legend([words.arm(arm) for arm in arms], list(colours.values()))
    figures = [_history(arms, colours), *_importances(arms, colours), *_slices(arms, colours)]
    body += f"<div class='figures'>{''.join(figures)}</div>"
    return Section("study", "Settings searched", body)


def _history(arms: Mapping[str, Any], colours: Mapping[str, int]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for arm, found in arms.items():
        cost, best, points = 0.0, None, []
        for trial in found["history"]:
            cost += trial["cost"] * trial["share"]
            if trial["complete"] and (best is None or trial["tau"] > best):
                best = trial["tau"]
            if best is not None:
                points.append((cost, best))
        series[arm] = points
    chart = charts.lines(
        series,
        [colours[arm] for arm in arms],
        x_label="cost so far, supervised rows × TTT steps",
        alt="Best τ on dev by cost: "
        + ", ".join(f"{arm} ends at {found['best_tau']:.3f}" for arm, found in arms.items()),
    )
    return words.figure("best τ so far", "by what was spent", chart)


def _importances(arms: Mapping[str, Any], colours: Mapping[str, int]) -> list[str]:
    figures = []
    for arm, found in arms.items():
        shares: Mapping[str, float] = found["importances"]
        if not shares:
            continue
        items = [
            charts.Bar(name, share, f"{share:.0%}", colours[arm]) for name, share in shares.items()
        ]
        told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        chart = charts.bars(
            items, start=0.0, end=1.0, alt=f"Importances of settings, {words.arm(arm)}: {told}."
        )
        title = f"what mattered, {words.arm(arm)}"
        figures.append(words.figure(title, "PED-ANOVA over trials that ran to the end", chart))
    return figures


def _slices(arms: Mapping[str, Any], colours: Mapping[str, int]) -> list[str]:
    names = {
        name: None
        for found in arms.values()
        for trial in found["history"]
        for name in trial["params"]
    }
    figures = []
    for name in names:
        series = {
            arm: [
                (trial["params"][name], trial["tau"])
                for trial in found["history"]
                if trial["complete"] and name in trial["params"]
            ]
            for arm, found in arms.items()
        }
        values = [x for points in series.values() for x, _ in points]
        if not values:
            continue
        wide = all(isinstance(x, float) and x > 0 for x in values) and (
            max(values) > 4 * min(values)
        )
        chart = dots(
            series,
            [colours[arm] for arm in arms],
            x_label=f"{name}, logarithmic" if wide else name,
            alt=f"τ on dev by {name}, {len(values)} trials.",
            log=wide,
        )
        figures.append(words.figure(name, "τ of trials that ran to the end", chart))
    return figures
