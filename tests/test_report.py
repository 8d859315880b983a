"""The report: its numbers are its inputs', missing inputs leave out sections, nothing is loaded."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eagle3.errors import HarnessError
from eagle3.report import charts, words
from eagle3.report.data import ReportData, read_curve, read_data
from eagle3.report.lineage import lineage
from eagle3.report.page import ReportSettings, render
from eagle3.report.result import headline
from eagle3.report.summary import summary
from tests.made_up import write_made_up

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Every element is closed in its order; collects ids, links and what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values["href"]))
        if tag in ("script", "link", "img", "iframe", "object"):
            self.loads.append(tag)
        self.loads += [
            f"{tag} {name}" for name in ("src", "srcset", "xlink:href") if name in values
        ]
        if tag == "svg" and values.get("class") == "chart":
            self.pictures.append(values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "line", "polyline", "meta"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


CHAIN = [
    {"stage": "compare", "needs": ["evaluate@a", "train@a"], "digest": "c" * 32, "runs": []},
    {"stage": "evaluate@a", "needs": ["train@a"], "digest": "e" * 32, "runs": ["run-1-of-a"]},
    {"stage": "train@a", "needs": ["verifier"], "digest": "d" * 32, "runs": []},
    {"stage": "verifier", "needs": [], "digest": "f" * 32, "runs": []},
]
CHAIN = [{**step, "reused": step["stage"] == "train@a"} for step in CHAIN]


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return write_made_up(tmp_path_factory.mktemp("made_up"))


@pytest.fixture(scope="module")
def data(made_up: dict[str, list[Path]]) -> ReportData:
    return read_data(
        comparison=made_up["comparison"][0],
        summaries=made_up["summaries"],
        timings=made_up["timings"],
        curves=made_up["curves"],
        coverage=made_up["coverage"][0],
        provenance=made_up["stages"],
        lineage=CHAIN,
    )


def test_complete_page(data: ReportData) -> None:
    page = render(data, ReportSettings(title="A <title> & more"))
    found = parsed(page)
    assert found.loads == []
    assert not re.search(r"url\(|@import|https?:", page)
    assert found.ids == list(dict.fromkeys(found.ids))
    assert set(found.links) <= {f"#{name}" for name in found.ids}
    for section in [
        "result",
        "speed",
        "acceptance",
        "training",
        "coverage",
        "exactness",
        "costs",
        "lineage",
        "origin",
        "limits",
    ]:
        assert section in found.ids
    assert found.pictures and all(len(str(p["aria-label"])) > 20 for p in found.pictures)
    assert "A <title> & more" in found.text


def test_numbers_are_the_inputs(data: ReportData) -> None:
    text = parsed(render(data, ReportSettings())).text
    assert data.comparison is not None
    assert data.comparison["comparison"]["verdict"] in text
    for arm, result in data.comparison["arms"].items():
        tau = result["tau"]["all"]
        assert f"{tau['value']:.2f} ({tau['low']:.2f}–{tau['high']:.2f})" in text
        assert f"{result['speedup']:.2f}×" in text
        for group in data.summaries[arm]["benchmarks"].values():
            assert f"{group['tau']:.3f}" in text
    edges = [item["break_even_tau"] for item in data.timings.values()]
    assert f"break-even {sum(edges) / len(edges):.2f}" in text
    assert "63 of 64 greedy texts" in text and "3.1e-05" in text
    assert "Imagined-1B" in text and "0123456789ab" in text
    assert "run-of-train@finetune" in text


def test_headline(data: ReportData) -> None:
    assert data.comparison is not None
    arms = data.comparison["arms"]
    tau = {name: arms[name]["tau"]["all"]["value"] for name in ("scratch", "finetune")}
    assert headline(data) == (
        f"The finetune drafter accepts more than scratch: {tau['finetune']:.2f} tokens a step "
        f"against {tau['scratch']:.2f}, and is faster than no speculation "
        f"({arms['finetune']['speedup']:.2f}×)."
    )
    changed = json.loads(json.dumps(data.comparison))
    changed["comparison"]["winner"] = None
    changed["arms"]["finetune"]["against_no_speculation"] = "slower"
    text = headline(ReportData(comparison=changed))
    assert text.startswith("No difference can be told between scratch")
    assert "finetune is slower than no speculation" in text


def test_missing_inputs_leave_sections_out(
    data: ReportData, made_up: dict[str, list[Path]], tmp_path: Path
) -> None:
    nothing = parsed(render(ReportData(), ReportSettings()))
    assert nothing.ids == []
    assert "No two arms have been compared yet." in nothing.text
    some = read_data(summaries=[*made_up["summaries"], tmp_path / "gone.json"])
    assert [i for i in parsed(render(some, ReportSettings())).ids if "-title" not in i] == [
        "acceptance", "exactness", "coverage",
    ]  # fmt: skip
    without_speed = ReportData(comparison=data.comparison, summaries=data.summaries)
    ids = parsed(render(without_speed, ReportSettings())).ids
    assert "result" in ids and "speed" not in ids and "training" not in ids


def test_what_another_verifier_gave_is_left_out(
    made_up: dict[str, list[Path]], tmp_path: Path
) -> None:
    ours = json.loads(made_up["summaries"][0].read_text())["verifier"]
    for name, verifier in (("ours", {"verifier": ours}), ("other", {"verifier": "B"}), ("old", {})):
        (tmp_path / name).write_text(json.dumps({"name": name, **verifier}))
    read = [
        read_data(summaries=made_up["summaries"], scaling=tmp_path / name).scaling
        for name in ("ours", "other", "old")
    ]
    assert [item and item["name"] for item in read] == ["ours", None, "old"]
    assert read_data(scaling=tmp_path / "other").scaling is not None


def test_summary(data: ReportData) -> None:
    found = summary(data)
    assert data.comparison is not None
    assert found["tau"]["base"]["mt_bench"] == round(
        data.summaries["base"]["benchmarks"]["mt_bench"]["tau"], 4
    )
    assert found["tau"]["finetune"]["all"] == round(data.summaries["finetune"]["all"]["tau"], 4)
    assert found["speedup"]["scratch"] == round(data.timings["scratch"]["speedup"], 3)
    assert found["greedy_exact"] == {"prompts": 64, "equal": 63, "near_ties": 1}
    assert found["compare"]["arms"] == ["scratch", "finetune"]
    assert set(found["compare"]) == {"arms", "delta", "low", "high", "verdict"}
    assert found["compare"]["verdict"] == "finetune"
    changed = json.loads(json.dumps(data.comparison))
    changed["comparison"]["winner"] = None
    assert summary(ReportData(comparison=changed))["compare"]["verdict"] == "no difference"
    assert found["seconds"]["train@scratch"] == 240.0
    assert "report" not in found["seconds"]


def test_arms_in_reading_order(data: ReportData) -> None:
    assert data.arms == ["base", "scratch", "finetune", "scratch_large"]
    assert data.training("scratch") == {"seconds": 240, "steps": 400, "tokens": 400_000}


def test_bars_are_to_scale() -> None:
    text = charts.bars(
        [charts.Bar("a", 1.5, "x", low=1.25, high=2.0)],
        start=1.0, end=2.0, alt="what it shows", line=charts.Line(1.75, "edge"),
    )  # fmt: skip
    assert 'width="50.00%"' in text
    assert 'x1="25.00%"' in text and 'x2="100.00%"' in text
    assert 'x1="75.00%"' in text
    assert 'aria-label="what it shows"' in text


def test_columns_and_lines_are_to_scale() -> None:
    text = charts.columns(["one"], {"a": [0.5], "b": [0.25]}, [0, 1], alt="a and b")
    assert 'height="120.0"' in text and 'height="60.0"' in text
    text = charts.lines({"a": [(0, 1.0), (10, 3.0)]}, [2], x_label="step", alt="a")
    assert 'points="0.0,1000.0 1000.0,0.0"' in text and "s2" in text


def test_thinning_keeps_means() -> None:
    points = [(i, float(i)) for i in range(1000)]
    thin = charts.thinned(points, 100)
    assert len(thin) == 100 and thin[0] == (4.5, 4.5)
    assert charts.thinned([(1, 2.0)]) == [(1.0, 2.0)]


def test_words() -> None:
    assert words.duration(42.4) == "42 s"
    assert words.duration(185) == "3 min 05 s"
    assert words.duration(7800) == "2 h 10 min"
    assert words.thousands(1234567) == "1,234,567"
    assert words.percent(None) == "–"


def test_broken_curve_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.curve.jsonl"
    path.write_text('{"metric": "loss", "step": 1, "value": 2.0}\n{"metric": "loss"}\n')
    with pytest.raises(HarnessError, match=r"a\.curve\.jsonl:2"):
        read_curve(path)


def test_the_picture_of_the_chain(data: ReportData) -> None:
    section = lineage(data)
    assert section is not None and "equal bytes: train@a" in section.body
    assert "verifier from outside; train@a from verifier; evaluate@a from train@a" in section.body
    assert "eeeeeeee · run run-1-of" in section.body
    lines = re.findall(
        r'<line x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', section.body
    )
    down = sorted((float(y1), float(y2)) for x1, y1, x2, y2 in lines if x1 == x2)
    # Rows are 16, 54, 92 and 130: each stage's line ends at the last stage that reads it.
    assert down == [(16.0, 54.0), (54.0, 130.0), (92.0, 130.0)]
    across = sorted(float(y1) for x1, y1, x2, _ in lines if x1 != x2)
    assert across == [54.0, 92.0, 130.0, 130.0]
    assert lineage(ReportData()) is None


def test_marks_of_an_axis_are_short() -> None:
    values = (0, 0.00003, 0.05, 1.5, 350, 2_000, 12_045, 200_396, 2_003_960)
    assert [charts.short(value) for value in values] == [
        *("0", "3e-5", "0.05", "1.5", "350", "2000", "12k", "200k", "2M"),
    ]
