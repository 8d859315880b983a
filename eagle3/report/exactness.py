"""The report's section on exactness: that speculation changed no text."""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section
from eagle3.report.summary import greedy_exact


def exactness(data: ReportData) -> Section | None:
    """That speculation changed no output."""
    arms = [arm for arm in data.arms if "decode" in data.summaries.get(arm, {})]
    if not arms:
        return None
    total = greedy_exact(data)
    body = (
        f"<p>{total['equal']} of {total['prompts']} greedy texts in fp32 are equal to plain "
        f"decoding, token for token. {total['near_ties']} part where the verifier's two best "
        "tokens are a near-tie, which passes of different shapes may settle differently; anything "
        "else would have stopped the evaluation.</p>"
    )
    ties = [
        [
            escape(f"{words.arm(arm)}, {tie['id']}"),
            str(tie["position"]),
            f"{tie['plain']} / {tie['speculative']}",
            f"{tie['gap']:.1e}",
        ]
        for arm in arms
        for tie in data.summaries[arm]["decode"]["exactness"]["near_ties"]
    ]
    if ties:
        body += words.table(
            ["arm and prompt", "at new token", "plain / speculative", "gap in fp64"],
            ties,
            caption="Near-ties",
        )
    return Section("exactness", "Does it change the output?", body)
