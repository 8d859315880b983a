"""The report's section on the arms: what each starts from, learns from and took."""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section

CHECKPOINTS = "checkpoints/"


def arms(data: ReportData) -> Section | None:
    """One row an arm that was trained; None where provenance tells of none."""
    rows = []
    for arm in data.arms:
        record = data.provenance.get(f"train@{arm}")
        if record is None:
            continue
        inputs, trained = record.get("inputs", {}), data.training(arm)
        starts = [path for path in inputs if path.startswith(CHECKPOINTS)]
        states = [path for path in inputs if path.endswith("states")]
        best = max(
            (value for _, value in data.curves.get(arm, {}).get("dev_tau", [])), default=None
        )
        rows.append(
            [
                escape(words.arm(arm)),
                escape(", ".join(words.arm(p.removeprefix(CHECKPOINTS)) for p in starts))
                or "scratch",
                escape(", ".join(states)) or "–",
                words.thousands(trained.get("steps")),
                words.thousands(trained.get("tokens")),
                "yes" if trained.get("stopped_early") else "no",
                words.duration(trained.get("seconds")),
                "–" if best is None else f"{best:.3f}",
            ]
        )
    if not rows:
        return None
    table = words.table(
        [
            *("arm", "starts from", "learns from", "steps", "tokens, all passes"),
            *("stopped early", "time", "best τ on dev"),
        ],
        rows,
        caption="The checkpoint that is kept is the one best on dev prompts",
    )
    return Section("arms", "The arms", table)
