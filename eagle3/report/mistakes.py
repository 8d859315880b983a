"""The report's section on what each silent mistake costs."""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def mistakes(data: ReportData) -> Section | None:
    """τ of one drafter under every convention, beside what older SGLang prints."""
    if data.mistakes is None:
        return None
    found = data.mistakes
    k = int(found["k"])

    def row(item: dict[str, object]) -> list[str]:
        rates = item["accepted_per_position"]
        assert isinstance(rates, list)
        return [
            escape(str(item["mistake"])),
            f"{item['tau']:.3f}",
            words.percent(float(str(item["old_sglang_rate"])), 1),
            " · ".join(words.percent(rate) for rate in rates),
            escape(str(item["cause"])) or "–",
        ]

    head = ["mistake", "τ", "older SGLang prints", "accepted at each draft", "how it comes about"]
    served = [row(item) for item in found["rows"] if item["where"] == "serving"]
    learnt = [row(item) for item in found["rows"] if item["where"] == "targets"]
    body = (
        f"<p>The {escape(words.arm(str(found['arm'])))} drafter, replayed under the conventions "
        "that engines and data sets differ in. None of these raises an error. Older SGLang prints "
        f"(accepted + bonus) / (rounds × {k + 1}), so {1 / (k + 1):.0%} there means that nothing "
        "was accepted.</p>"
        + words.table(
            head,
            served,
            caption=f"{found['documents']} dev documents, k = {k}, greedy, by replay",
        )
    )
    if learnt:
        body += words.table(
            head,
            learnt,
            caption=(
                "Wrong training targets cannot be seen when serving: the most that a drafter which "
                "learnt them perfectly could accept"
            ),
        )
    return Section("mistakes", "What silent mistakes cost", body)
