"""The report's section on the comparison over seeds: winners, differences and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eagle3.report import charts, words
from eagle3.report.colours import study_tones
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def over_seeds(data: ReportData) -> Section | None:
    """Both winners, trained with several seeds."""
    if data.study is None or data.study.get("compare") is None:
        return None
    compare: Mapping[str, Any] = data.study["compare"]
    arms: Mapping[str, Any] = compare["arms"]
    colours = study_tones(data, list(arms))
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
    body = words.figure(
        f"τ of the settings found, {compare['seeds']} seeds each",
        f"{compare['prompts']} test prompts, {level} t-intervals over seeds; bars do not start at "
        "1",
        chart,
        wide=True,
    )
    if "verdict" in compare:
        body += f"<p class='verdict'>{escape(compare['verdict'])}</p>" + _differences(compare)
    body += _costs(compare["costs"])
    if data.calibration is not None:
        body += f"<p class='note'>{escape(_calibrated(data.calibration))}</p>"
    return Section("seeds", "Compared over seeds", body)


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
        tau = words.tau(row["tau"])
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
