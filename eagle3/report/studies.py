"""The report's sections on studies: the search, the comparison over seeds, the crossover map.

Each a function of the data, None where its input is missing, as in `eagle3.report.sections`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eagle3.report import charts, words
from eagle3.report.data import ReportData
from eagle3.report.dots import dots
from eagle3.report.sections import Section, tones

ARM_TONES = (1, 2, 3, 4, 5, 0)


def search(data: ReportData) -> Section | None:
    """What each arm's search tried and found."""
    if data.study is None:
        return None
    arms: Mapping[str, Any] = data.study["arms"]
    colours = _colours(data, list(arms))
    rows = [
        [
            escape(words.arm(arm)),
            f"{found['trials']}, {found['pruned']} given up",
            _tau(found["default_tau"]),
            f"<strong>{_tau(found['best_tau'])}</strong>",
            escape(_settings(found["best"])),
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


def over_seeds(data: ReportData) -> Section | None:
    """Both winners, trained with several seeds."""
    if data.study is None or data.study.get("compare") is None:
        return None
    compare: Mapping[str, Any] = data.study["compare"]
    arms: Mapping[str, Any] = compare["arms"]
    colours = _colours(data, list(arms))
    level = f"{compare['level']:.0%}"
    estimates = {arm: found["all"] for arm, found in arms.items()}
    most = max(item["high"] for item in estimates.values())
    least = min(item["low"] for item in estimates.values())
    told = "; ".join(f"{words.arm(arm)} {words.interval(e)}" for arm, e in estimates.items())
    chart = charts.bars(
        [
            charts.Bar(
                words.arm(arm), e["value"], words.interval(e), colours[arm], e["low"], e["high"]
            )
            for arm, e in estimates.items()
        ],
        start=max(1.0, least - 2 * (most - least)),
        end=most + 0.1 * (most - least) + 1e-6,
        alt=f"Acceptance length over {compare['seeds']} seeds with {level} intervals: {told}.",
    )
    body = (
        f"<figure class='wide'><figcaption>τ of the settings found, {compare['seeds']} seeds each "
        f"<span>{compare['prompts']} test prompts, {level} t-intervals over seeds; bars do not "
        f"start at 1</span></figcaption>{chart}</figure>"
    )
    if "verdict" in compare:
        body += f"<p class='verdict'>{escape(compare['verdict'])}</p>" + _differences(compare)
    body += _costs(compare["costs"])
    if data.calibration is not None:
        body += f"<p class='note'>{escape(_calibrated(data.calibration))}</p>"
    return Section("seeds", "Compared over seeds", body)


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
            _tau(about["start_tau"]),
            escape(about["words"]),
        ]
        for bits, about in found["siblings"].items()
    ]
    body = (
        charts.legend(list(curves), colours)
        + f"<figure class='wide'><figcaption>τ on {found['prompts']} dev prompts "
        f"<span>mean of {found['seeds']} seeds, each budget a training of its own"
        f"</span></figcaption>{chart}</figure>"
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


def _colours(data: ReportData, arms: Sequence[str]) -> dict[str, int]:
    known = tones(data)
    return {
        arm: known.get(arm, ARM_TONES[index % len(ARM_TONES)]) for index, arm in enumerate(arms)
    }


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
    return _figure("best τ so far", "by what was spent", chart)


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
        figures.append(_figure(title, "PED-ANOVA over trials that ran to the end", chart))
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
        figures.append(_figure(name, "τ of trials that ran to the end", chart))
    return figures


def _differences(compare: Mapping[str, Any]) -> str:
    first, second = compare["compared"]
    rows = []
    for name, item in compare["by_benchmark"].items():
        size = item["effect_size"]
        rows.append(
            [
                escape(words.benchmark(name)),
                f"{item['value']:+.4f} ({item['low']:+.4f} to {item['high']:+.4f})",
                f"{item['sd']:.4f}",
                "–" if size is None else f"{size:+.2f}",
                words.percent(item["power"]),
                words.thousands(item["seeds_needed"]),
                words.thousands(item["prompts_needed"]),
            ]
        )
    effect, wanted = compare["effect"], f"{compare['wanted_power']:.0%}"
    return words.table(
        [
            "prompts",
            f"{words.arm(second)} minus {words.arm(first)}",
            "sd over seeds",
            "effect size",
            f"power at {effect}",
            "seeds needed",
            "prompts needed",
        ],
        rows,
        caption=(
            f"Differences paired by seed, the seed as the unit. Needed: to see {effect} τ in "
            f"{wanted} of all comparisons, seeds on these prompts or prompts with these seeds; a "
            "dash where no number is enough"
        ),
    )


def _costs(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        tau = _tau(row["tau"])
        if row["half"] is not None:
            tau += f" ± {row['half']:.3f}"
        cells.append(
            [
                escape(words.arm(row["name"])),
                escape(row["what"]),
                words.thousands(row["tokens"]),
                words.duration(row["seconds"]),
                words.thousands(row["seeds"]),
                tau,
            ]
        )
    return words.table(
        ["", "trained", "tokens", "time", "seeds", "τ on test prompts"],
        cells,
        caption="What each side cost, the head start in a row of its own",
    )


def _calibrated(found: Mapping[str, Any]) -> str:
    return (
        f"Calibration: of {found['simulations']:,} simulated comparisons of equal recipes with "
        f"{found['seeds']} seeds each, {found['rejected_share']:.1%} were called different; of "
        f"those 0.05 τ apart, {found['power_at_0.05']:.0%}. Variances are those of "
        f"{found['trained_seeds']} short trainings of {words.arm(found['arm'])}, whose τ spread by "
        f"{found['sd_of_a_training']:.4f}."
    )


def _figure(title: str, note: str, chart: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)} <span>{escape(note)}</span></figcaption>"
        f"{chart}</figure>"
    )


def _settings(trial: Mapping[str, Any] | None) -> str:
    if trial is None:
        return "–"
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in trial["params"].items()
    )


def _tau(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


STUDIES = (search, over_seeds, crossover)
