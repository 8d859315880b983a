"""The report's section on hidden states: are they what serving sees, and who says so?"""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def checked_against_server(data: ReportData) -> bool:
    """Whether a serving engine computed states again that agreed."""
    return data.parity is not None and data.parity["engine"] in ("sglang", "vllm")


def contract(data: ReportData) -> Section | None:
    """What the parity stage found, split by split."""
    if data.parity is None:
        return None
    rows, states = [], []
    for folder, splits in data.parity["states"].items():
        for name, found in splits.items():
            final = found["final"] or {}
            right = final.get("accuracies", {}).get(found["final_hidden"])
            layers = ", ".join(map(str, found["aux_layers"]))
            rows.append(
                [
                    escape(f"{folder}/{name}"),
                    escape(found["made_by"]),
                    f"{layers}; final {escape(found['final_hidden'].replace('_', '-'))}",
                    words.percent(right, 1),
                    words.percent(final.get("top1_agreement"), 1),
                    escape(found["words"]),
                ]
            )
            for slot in (found["engine"] or {}).get("states", []):
                states.append(
                    [
                        escape(f"{folder}/{name}, {slot['name']}"),
                        escape(slot["found"]),
                        f"{slot['error']:.2%}",
                        f"{slot['noise']:.2%}",
                        f"{slot['next_reading']:.0%}",
                    ]
                )
    verdict = escape(str(data.parity["words"]))
    body = (
        f"<p><strong>{verdict[0].upper()}{verdict[1:]}.</strong> A drafter that is served with "
        "other layers, another final state or other rows than it learnt loads without an error and "
        "accepts next to nothing, so a mismatch stops the pipeline before training.</p>"
        + words.table(
            ["states", "made by", "declared", "next token right", "top-1 agrees", "verdict"],
            rows,
            caption=(
                "Next token right: the stored final state, read as declared, through the "
                "verifier's head. Top-1 agrees: that argmax and the stored one"
            ),
        )
    )
    if states:
        body += words.table(
            ["stored states", "are", "relative error", "noise", "next reading"],
            states,
            caption=(
                "By value, against the engine named: noise is what the engine differs by from "
                "itself or from rounding, next reading how far the nearest other state lies"
            ),
        )
    return Section("contract", "Are these the states that serving sees?", body)
