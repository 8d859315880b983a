"""The report's section on training speed: this project and another one on the same task.

Measured apart from the pipeline, by `experiments.benchmarks.training`.
"""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def trainers(data: ReportData) -> Section | None:
    """One row a trainer and length of documents; None where nothing was measured."""
    found = data.trainers
    if found is None:
        return None
    machine = found["machine"]
    rows = [
        [
            escape(str(row["trainer"])),
            escape(str(row.get("documents", found.get("documents", "–")))),
            words.thousands(row["length"]),
            words.thousands(row["tokens_per_s"]),
            f"{row['peak_rss_gib']:.2f} GiB",
            f"{row['loss']:.4f}",
        ]
        for row in found["rows"]
    ]
    table = words.table(
        ["trainer", "documents", "rows each", "tokens/s", "peak memory", "loss after"],
        rows,
        caption=(
            f"Measured apart from this run, in turns on {machine['threads']} threads of "
            f"{machine['processor']}, with speculators {machine['speculators']}: the same "
            "documents, optimizer and number of steps"
        ),
    )
    return Section("trainers", "How fast it trains", table)
