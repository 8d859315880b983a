"""The report's section on what a reader might take from the numbers and must not."""

from __future__ import annotations

from html import escape

from eagle3.report.contract import checked_against_server
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def limits(data: ReportData) -> Section | None:
    """What a reader might take from the numbers and must not."""
    if data.comparison is None:
        return None
    seeds, prompts = data.comparison["seeds"], data.comparison["prompts"]
    timing = next(iter(data.timings.values()), {})
    named = f" ({data.verifier})" if data.verifier else ""
    items = [
        f"One verifier{named}, answering {prompts} prompts greedily. Other verifiers and other "
        "prompts accept other lengths."
    ]
    if any("sibling" in stage for stage in data.provenance):
        items.append(
            "The checkpoint that finetuning starts from was trained on a stand-in: the same "
            "verifier with rounded weights, in the place of a related model with a published "
            "drafter."
        )
    if not checked_against_server(data):
        items.append(
            "The hidden states were not compared with those of a serving engine. A server that "
            "reads other layers, or another final state, accepts less."
        )
    if seeds == 1:
        items.insert(
            0,
            "Each arm was trained once. Another seed would move τ by an amount that the intervals, "
            "which cover prompts only, do not hold.",
        )
    else:
        items.insert(0, f"{seeds} seeds are few: the interval over seeds is rough.")
    if timing.get("device", "cpu") == "cpu":
        items.append(
            "Speed was measured on a CPU, one request at a time. On a GPU under load the cost of "
            "verifying differs, and with it the break-even."
        )
    if float(timing.get("temperature", 0)) == 0:
        items.append("Everything is greedy; at a temperature other drafts are accepted.")
    return Section(
        "limits",
        "What this does not show",
        "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>",
    )
