"""The report's section on codecs: its numbers are the file's, and it is left out without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3.report.codecs import codecs
from eagle3.report.data import ReportData, read_data


def measured(low: float, high: float) -> dict[str, Any]:
    difference = {"value": -0.0125, "low": low, "high": high, "by_seed": [-0.01, -0.015]}
    errors = [
        {"state": "layer 1", "mean": 0.0215, "largest": 0.0312},
        {"state": "final", "mean": 0.0198, "largest": 0.0275},
    ]
    return {
        "verifier": "Imagined-1B", "arm": "scratch_large", "dtype": "bfloat16",
        "hidden_size": 576, "tokens": 80_000, "seeds": 2, "prompts": 61, "k": 3, "level": 0.95,
        "codecs": [
            {"codec": "none", "bytes_per_row": 4621.5, "tau_by_seed": [1.4125, 1.42]},
            {
                "codec": "fp8", "bytes_per_row": 2333.4, "tau_by_seed": [1.4025, 1.405],
                "errors": errors, "difference": difference,
            },
        ],
    }  # fmt: skip


def test_what_it_says() -> None:
    assert codecs(ReportData()) is None
    section = codecs(ReportData(codecs=measured(-0.0443, 0.0193)))
    assert section is not None and section.id == "codecs"
    for words in (
        "In fp8 states take 50% of the bytes of plain bfloat16",
        "moves by 2.1% of its length on average, by 3.1% at most",
        "ones: -0.013 (95% interval -0.044 to +0.019 over 2 seeds). No difference can be told.",
        "none: bfloat16", "4,622", "2,333", "50%", "1.4125 · 1.4200", "-0.0100 · -0.0150",
        "layer 1", "2.15%", "3.12%", "scratch large recipe", "80,000 training tokens",
    ):  # fmt: skip
        assert words in section.body, words


def test_a_difference_that_can_be_told() -> None:
    for low, high, word in (
        (-0.02, -0.005, "They accept less."),
        (0.01, 0.02, "They accept more."),
    ):
        section = codecs(ReportData(codecs=measured(low, high)))
        assert section is not None and word in section.body


def test_another_verifiers_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "codecs.json").write_text(json.dumps(measured(-1, 1)))
    for verifier, there in (("Imagined-1B", True), ("B", False)):
        summary = tmp_path / "scratch.json"
        summary.write_text(json.dumps({"verifier": verifier}))
        found = read_data(summaries=[summary], codecs=tmp_path / "codecs.json")
        assert (found.codecs is not None) == there
