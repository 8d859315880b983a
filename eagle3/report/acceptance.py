"""The report's section on acceptance, by draft position and benchmark."""

from __future__ import annotations

from html import escape

from eagle3.report import charts, words
from eagle3.report.colours import tones
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def acceptance(data: ReportData) -> Section | None:
    """By draft position and benchmark, unconditional in charts and both in tables."""
    arms = [arm for arm in data.arms if arm in data.summaries]
    if not arms:
        return None
    colour = tones(data)
    names = [*data.summaries[arms[0]]["benchmarks"]]
    figures, tables = [], []
    for name in [*names, "all"]:
        groups = {
            arm: data.summaries[arm]["all"] if name == "all" else found
            for arm in arms
            if name == "all" or (found := data.summaries[arm]["benchmarks"].get(name))
        }
        if not groups:
            continue
        some = next(iter(groups.values()))
        positions = [f"draft {i + 1}" for i in range(len(some["per_position_unconditional"]))]
        rates = {arm: group["per_position_unconditional"] for arm, group in groups.items()}
        told = "; ".join(
            f"{words.arm(arm)} {', '.join(words.percent(rate) for rate in values)}"
            for arm, values in rates.items()
        )
        if name != "all" or len(names) > 1:
            chart = charts.columns(
                positions,
                rates,
                [colour[arm] for arm in groups],
                alt=f"{words.benchmark(name)}, steps that accept each draft: {told}.",
            )
            note = f"{some['prompts']} prompts, % of steps"
            figures.append(words.figure(words.benchmark(name), note, chart))
        tables += [
            [
                f"{escape(words.arm(arm))}, {escape(words.benchmark(name))}",
                f"{group['tau']:.3f}",
                words.percent(group["acceptance_rate"], 1),
                " · ".join(words.percent(rate) for rate in group["per_position_unconditional"]),
                " · ".join(words.percent(rate) for rate in group["per_position_conditional"]),
                words.thousands(group["verify_steps"]),
            ]
            for arm, group in groups.items()
        ]
    head = ["arm and prompts", "τ", "acceptance rate", "unconditional", "conditional", "steps"]
    key = charts.legend([words.arm(arm) for arm in arms], [colour[arm] for arm in arms])
    caption = f"Greedy, k = {data.summaries[arms[0]]['k']}, counted by replay"
    body = (
        f"{key}<div class='figures'>{''.join(figures)}</div>"
        + words.folded("All rates", words.table(head, tables, caption=caption))
        + (
            "<p class='note'>Unconditional: of all verification steps. Conditional: of the steps "
            "that accepted every draft before. τ is 1 + accepted drafts / steps over all prompts, "
            "the bonus token included and the prompt's own token left out.</p>"
        )
    )
    return Section("acceptance", "Acceptance by position and benchmark", body)
