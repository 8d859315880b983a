"""The report in a real browser: nothing sticks out, nothing is said on the console, dark, printed.

Chromium is a program of the system; where there is none, these tests say so and are skipped.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.report.data import read_data
from eagle3.report.page import ReportSettings, render
from tests.chromium import chromium, needs_chromium
from tests.made_up import write_made_up
from tests.test_report import CHAIN
from tests.test_report_codecs import measured
from tests.test_report_studies import CALIBRATION, CROSSOVER, STUDY
from tests.test_report_texts import text

pytestmark = [pytest.mark.slow, needs_chromium]

PHONE, DESK, PAPER = 390, 1280, 794  # pixels; the last is A4 at 96 to the inch
DARK = "--blink-settings=preferredColorScheme=0"
# A frame has any width, which a window does not; `file:` pages may look into their frames.
FRAME = """<!doctype html><iframe id="page" src="page.html" width="{width}" height="2000"
style="border: 0"></iframe><pre id="seen"></pre><script>
page.onload = () => {{
  const inside = page.contentDocument, style = page.contentWindow.getComputedStyle(inside.body);
  const colour = (name) => style.getPropertyValue(name).trim();
  const named = ["--paper", "--ink", "--soft", "--edge"].map((name) => [name, colour(name)]);
  const shown = (found) => [...inside.querySelectorAll(found)].filter((e) => e.checkVisibility());
  seen.textContent = JSON.stringify({{
    wide: inside.documentElement.scrollWidth,
    background: style.backgroundColor,
    colours: Object.fromEntries(named),
    menu: shown("nav").length, folded: inside.querySelectorAll("details > :not(summary)").length,
    unfolded: shown("details > :not(summary)").length, charts: shown("figure").length,
  }});
}}</script>"""


@dataclass
class Seen:
    """What a browser made of a page: measures, and lines of its console."""

    measures: dict[str, Any]
    console: list[str]


def look(folder: Path, page: str, width: int, *flags: str) -> Seen:
    (folder / "page.html").write_text(page)
    (folder / "frame.html").write_text(FRAME.format(width=width))
    shown, said = chromium(
        folder / "browser",
        (folder / "frame.html").as_uri(),
        *("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom"),
        *("--window-size=1400,2200", *flags),
    )
    (measures,) = re.findall(r'<pre id="seen">(.*?)</pre>', shown)
    console = [line for line in said.splitlines() if "CONSOLE" in line]
    return Seen(json.loads(html.unescape(measures)), console)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    files = write_made_up(tmp_path_factory.mktemp("made_up"))
    data = read_data(
        comparison=files["comparison"][0],
        summaries=files["summaries"],
        timings=files["timings"],
        curves=files["curves"],
        coverage=files["coverage"][0],
        provenance=files["stages"],
        lineage=CHAIN,
    )
    sample = text("f8ffc91a9fdc2a41", [0, 1, 2, 3])
    long = [{**sample, "prompt": "long" * 60, "pieces": ["long" * 60, *sample["pieces"][1:]]}]
    full = replace(
        data,
        study=STUDY,
        calibration=CALIBRATION,
        crossover=CROSSOVER,
        codecs=measured(-0.0443, 0.0193),
        texts=dict.fromkeys(data.summaries, long),
    )
    return render(full, ReportSettings())


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("flags", [(), (DARK,)])
def test_nothing_sticks_out_and_the_console_is_silent(
    tmp_path: Path, page: str, width: int, flags: tuple[str, ...]
) -> None:
    seen = look(tmp_path, page, width, *flags)
    assert seen.console == []
    assert seen.measures["wide"] == width
    assert seen.measures["charts"] > 8 and seen.measures["menu"] == 1


def test_a_fault_would_be_seen(tmp_path: Path, page: str) -> None:
    fault = '<p style="width: 500px">wide</p><script>console.error("loud"); nothing()</script>'
    seen = look(tmp_path, page.replace("</main>", f"{fault}</main>"), PHONE)
    assert seen.measures["wide"] > PHONE
    assert any("loud" in line for line in seen.console)
    assert any("nothing is not defined" in line for line in seen.console)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` or `#rgb`, 0 to 1 (WCAG 2.2)."""
    digits = colour.removeprefix("#")
    digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_dark_and_light_can_be_read(tmp_path: Path, page: str) -> None:
    assert contrast("#fff", "#000000") == pytest.approx(21.0)
    light, dark = (look(tmp_path, page, DESK, *flags).measures for flags in ((), (DARK,)))
    assert luminance(light["colours"]["--paper"]) > 0.9
    assert luminance(dark["colours"]["--paper"]) < 0.02
    assert (light["background"], dark["background"]) == ("rgb(253, 253, 252)", "rgb(21, 24, 28)")
    for colours in (light["colours"], dark["colours"]):
        for name in ("--ink", "--soft", "--edge"):
            assert contrast(colours[name], colours["--paper"]) >= 4.5, (name, colours)


def test_printed_it_is_white_and_whole(tmp_path: Path, page: str) -> None:
    """The rules for print, on a dark screen too; then the printer's own file."""
    printed = page.replace("@media print", "@media all")
    measures = look(tmp_path, printed, PAPER, DARK).measures
    assert measures["background"] == "rgb(255, 255, 255)" and measures["menu"] == 0
    assert measures["wide"] == PAPER
    assert measures["unfolded"] == measures["folded"] > 0
    assert look(tmp_path, page, PAPER).measures["unfolded"] == 0
    (tmp_path / "page.html").write_text(page)
    sheets = tmp_path / "sheets.pdf"
    chromium(
        tmp_path / "browser", (tmp_path / "page.html").as_uri(), f"--print-to-pdf={sheets}", DARK
    )
    content = sheets.read_bytes()
    assert content.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", content)) > 3
