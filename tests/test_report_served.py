"""The report's table of serving engines: numbers are the inputs'; it is left out without them."""

from __future__ import annotations

import re

from eagle3.report.data import ReportData
from eagle3.report.served import served

COUNTS = {
    "engine": "vllm", "version": "0.32.0", "dtype": "float32", "tau": 1.8627,
    "per_position_unconditional": [0.49, 0.245, 0.1275], "prompts": 4, "equal_to_plain": 4,
    "equal_to_local": 3, "distinct_trigrams": 0.931, "old_sglang_rate": 0.4657,
}  # fmt: skip


def cells(body: str) -> list[str]:
    return [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", body)]


def test_numbers_are_the_inputs() -> None:
    data = ReportData(
        summaries={"scratch": {"served": COUNTS}, "base": {"served": None}},
        timings={"scratch": {"served": {"speedup": 1.234}}},
    )
    section = served(data)
    assert section is not None
    row = cells(section.body)[-9:]
    assert row == [
        "scratch", "vllm 0.32.0, float32", "1.863", "49% / 24% / 13%", "1.23×", "4 of 4", "3 of 4",
        "93%", "47%",
    ]  # fmt: skip


def test_without_a_server_there_is_no_section() -> None:
    assert served(ReportData(summaries={"scratch": {}})) is None
