"""The report's section on serving engines: what their real servers counted, and their speed."""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def served(data: ReportData) -> Section | None:
    """Every arm that a server decoded with; None where evaluation asked none."""
    rows = []
    for arm in data.arms:
        counts = data.summaries.get(arm, {}).get("served")
        if counts is None:
            continue
        speed = data.timings.get(arm, {}).get("served", {})
        prompts, local = counts["prompts"], counts["equal_to_local"]
        rows.append(
            [
                escape(words.arm(arm)),
                escape(f"{counts['engine']} {counts['version']}, {counts['dtype']}"),
                f"{counts['tau']:.3f}",
                " / ".join(f"{rate:.0%}" for rate in counts["per_position_unconditional"]),
                f"{speed['speedup']:.2f}×" if speed else "–",
                f"{counts['equal_to_plain']} of {prompts}",
                "–" if local is None else f"{local} of {prompts}",
                words.percent(counts["distinct_trigrams"]),
                words.percent(counts["old_sglang_rate"]),
            ]
        )
    if not rows:
        return None
    head = ["arm", "server", "τ", "accepted at 1, 2, …", "speed"]
    head += ["text as without drafts", "steps as here", "distinct trigrams", "old SGLang's rate"]
    body = words.table(
        head,
        rows,
        caption=(
            "The prompts of real decoding, greedily, one at a time. Steps as here: the same tokens "
            "out of the same steps as the local engine in fp32. Old SGLang's rate: what its "
            "older versions would print, with a floor that says that nothing was accepted"
        ),
    )
    return Section("served", "In a serving engine", body)
