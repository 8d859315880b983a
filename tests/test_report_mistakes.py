"""The report's table of silent mistakes: its numbers are its input's."""

from __future__ import annotations

from eagle3.report.data import ReportData
from eagle3.report.mistakes import mistakes


def test_numbers_are_the_inputs() -> None:
    def row(mistake: str, where: str, tau: float) -> dict[str, object]:
        return {
            "mistake": mistake, "cause": "a <cause>", "where": where, "tau": tau,
            "accepted_per_position": [0.42, 0.125, 0.0], "old_sglang_rate": tau / 4,
        }  # fmt: skip

    rows = [row("as trained", "serving", 1.693), row("targets", "targets", 1.304)]
    found = {"arm": "scratch_large", "k": 3, "documents": 24, "tokens": 5224, "rows": rows}
    assert mistakes(ReportData()) is None
    section = mistakes(ReportData(mistakes=found))
    assert section is not None and section.body.count("<table>") == 2
    for text in (
        "1.693",
        "42.3%",
        "42% · 12% · 0%",
        "a &lt;cause&gt;",
        "scratch large",
        "× 4",
        "25%",
    ):
        assert text in section.body, text
