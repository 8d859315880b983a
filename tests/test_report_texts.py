"""Sample texts, data, arms, engines and trainers in the report: chosen and shaded as by hand."""

from __future__ import annotations

from typing import Any

from eagle3.report.arms import arms
from eagle3.report.data import ReportData
from eagle3.report.data_used import data_used
from eagle3.report.engines import engines
from eagle3.report.texts import middles, texts
from eagle3.report.trainers import trainers


def text(name: str, positions: list[int], benchmark: str = "mt_bench") -> dict[str, Any]:
    pieces = [f"<{name}{number}>" for number in range(len(positions))]
    return {
        "id": name, "benchmark": benchmark, "prompt": "Why & how?", "pieces": pieces,
        "positions": positions,
    }  # fmt: skip


# Shares of drafted tokens in mt_bench: a 0, b 1/4, c 3/4; the middle one is b.
TEXTS = [text("c", [0, 1, 2, 3]), text("a", [0, 0, 0, 0]), text("b", [0, 1, 0, 0])]


def test_the_middle_prompt_of_each_benchmark() -> None:
    found = {item["id"]: item for item in [*TEXTS, text("z", [0, 5], "human_eval")]}
    assert middles({"scratch": found}) == ["z", "b"]
    # A prompt that one arm lacks is not comparable.
    assert middles({"scratch": found, "base": {"a": found["a"]}}) == ["a"]


def test_tokens_are_shaded_by_position() -> None:
    found = {"scratch": [text("x", [0, 1, 2, 5])]}
    section = texts(ReportData(texts=found, summaries={"scratch": {}}))
    assert section is not None
    assert (
        "<p class='decoded'>&lt;x0&gt;"
        '<span class="d1" title="draft 1">&lt;x1&gt;</span>'
        '<span class="d2" title="draft 2">&lt;x2&gt;</span>'
        '<span class="d4" title="draft 5">&lt;x3&gt;</span></p>'
    ) in section.body
    assert "3 of 4 tokens drafted: 1 first, 1 second, 1 5th" in section.body
    assert "Why &amp; how?" in section.body and "draft 4 or deeper" in section.body
    assert texts(ReportData()) is None


def test_data_and_arms_from_provenance() -> None:
    record = {
        "seconds": 61.0,
        "inputs": {"checkpoints/base": "0", "data/hidden_states": "1"},
        "notes": {"trained": {"steps": 12, "tokens": 3456, "stopped_early": True}},
    }
    notes = {"train": {"responses": 8, "supervised_tokens": 1234, "ended": 2}, "seconds": 3.0}
    data = ReportData(
        curves={"finetune": {"dev_tau": [(1, 1.25), (2, 1.5), (3, 1.4)]}},
        provenance={
            "train@finetune": record,
            "regenerate": {"notes": notes},
            "extract": {"notes": {"train": {"tokens": 5678}}},
            "prompts": {"notes": {"test": {"mt_bench": 80, "human_eval": 164}}},
        },
    )
    section = arms(data)
    assert section is not None
    for cell in ("base", "data/hidden_states", "3,456", "yes", "1 min 01 s", "1.500"):
        assert f">{cell}</td>" in section.body, cell
    section = data_used(data)
    assert section is not None
    for cell in ("8", "25%", "1,234", "5,678", "244", "HumanEval 164, MT-bench 80"):
        assert f">{cell}</td>" in section.body, cell
    assert arms(ReportData()) is None and data_used(ReportData()) is None


ENGINES = {
    "verifier": "Imagined-1B", "drafter": "finetune", "dtype": "float32",
    "rows": [
        {
            "engine": "vllm", "version": "1.2", "tau": 1.75, "accepted_per_position": [3, 1],
            "verify_steps": 4, "tokens_equal": True, "prompts": 4, "max_relative_error": 2.5e-6,
        }
    ],
    "diagnoses": [{"fault": "none", "named": []}, {"fault": "shifted", "named": ["by < one"]}],
}  # fmt: skip


def test_engines_of_the_same_verifier() -> None:
    section = engines(ReportData(engines=ENGINES))
    assert section is not None
    for cell in ("1.750", "75% · 25%", "all", "2.5e-06", "by &lt; one"):
        assert f">{cell}</td>" in section.body, cell
    assert "Faults put into states on purpose: 1" in section.body
    other = {"a": {"verifier": "Another", "benchmarks": {}}}
    assert engines(ReportData(engines=ENGINES, summaries=other)) is None


def test_trainers() -> None:
    row = {
        "trainer": "eagle3", "documents": "real", "length": 2048, "tokens_per_s": 2802.8,
        "peak_rss_gib": 0.981, "loss": 1.25,
    }  # fmt: skip
    machine = {"threads": 2, "processor": "A processor", "speculators": "0.9.0"}
    section = trainers(ReportData(trainers={"machine": machine, "rows": [row]}))
    assert section is not None
    for cell in ("real", "2,048", "2,803", "0.98 GiB", "1.2500"):
        assert f">{cell}</td>" in section.body, cell
    assert trainers(ReportData()) is None
