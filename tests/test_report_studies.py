"""The report's sections on studies: what they say, and that they are left out without a study."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import HarnessError
from eagle3.report.crossover import crossover
from eagle3.report.data import ReportData
from eagle3.report.page import ReportSettings, render
from eagle3.report.search import search
from eagle3.report.seeds import over_seeds
from stages.report import ALONE, page


def trial(number: int, tau: float, lr: float, complete: bool = True) -> dict[str, Any]:
    return {
        "trial": number, "tau": tau, "complete": complete, "share": 1.0 if complete else 0.25,
        "params": {"lr": lr, "noise.kind": "none"}, "tokens": 90, "cost": 200, "seconds": 3.0,
    }  # fmt: skip


def arm(best: float) -> dict[str, Any]:
    history = [trial(0, 1.25, 2e-3), trial(1, 1.125, 4e-3, complete=False), trial(2, best, 1e-4)]
    return {
        "trials": 3, "pruned": 1, "best": history[2], "default_tau": 1.25, "best_tau": best,
        "importances": {"lr": 0.75, "noise.kind": 0.25}, "history": history,
    }  # fmt: skip


def seeds(value: float) -> dict[str, Any]:
    return {"all": {"value": value, "low": value - 0.01, "high": value + 0.01, "by_seed": []}}


DIFFERENCE = {
    "value": 0.02, "low": 0.005, "high": 0.035, "sd": 0.012, "effect_size": 1.67, "power": 0.99,
    "seeds_needed": 3, "prompts_needed": None,
}  # fmt: skip
ROW = {
    "name": "scratch", "what": "as found", "tokens": 92_000, "cost": 200, "seconds": 61.0,
    "seeds": 5, "tau": 1.5, "half": 0.01,
}  # fmt: skip
STUDY = {
    "study": "default", "seconds": 1500.0, "cost": 190_000, "wall_limit_reached": False,
    "arms": {"scratch": arm(1.5), "finetune": arm(1.75)},
    "compare": {
        "level": 0.95, "seeds": 5, "prompts": 244, "verdict": "finetune accepts more than scratch",
        "arms": {"scratch": seeds(1.5), "finetune": seeds(1.52)}, "costs": [ROW],
        "compared": ["scratch", "finetune"], "effect": 0.05, "wanted_power": 0.8,
        "by_benchmark": {"all": DIFFERENCE},
    },
}  # fmt: skip
CALIBRATION = {
    "simulations": 4000, "seeds": 5, "rejected_share": 0.051, "power_at_0.05": 0.97,
    "trained_seeds": 8, "arm": "scratch", "sd_of_a_training": 0.011,
}  # fmt: skip
CROSSOVER = {
    "level": 0.95, "seeds": 3, "prompts": 61,
    "curves": {
        "scratch": [{"tokens": 100, "value": 1.1}, {"tokens": 200, "value": 1.5}],
        "finetune, 3-bit sibling": [{"tokens": 100, "value": 1.3}, {"tokens": 200, "value": 1.4}],
    },
    "siblings": {"3": {"start_tau": 1.25, "words": "overtakes at about 170 tokens"}},
}  # fmt: skip


def test_nothing_without_a_study() -> None:
    assert [make(ReportData()) for make in (search, over_seeds, crossover)] == [None, None, None]


def test_the_search() -> None:
    section = search(ReportData(study=STUDY))
    assert section is not None
    for words in ("3, 1 given up", "1.2500", "<strong>1.7500</strong>", "lr 0.0001", "25 min"):
        assert words in section.body, words
    # Slices: a dot for each finished trial of both arms, over lr and over the kind of noise.
    assert section.body.count("<circle") == 8
    assert "lr, logarithmic" in section.body and "PED-ANOVA" in section.body
    assert "outer limit" not in section.body
    limited = search(ReportData(study={**STUDY, "wall_limit_reached": True}))
    assert limited is not None and "outer limit" in limited.body


def test_the_comparison() -> None:
    section = over_seeds(ReportData(study=STUDY, calibration=CALIBRATION))
    assert section is not None
    for words in ("finetune accepts more", "+0.0200 (+0.0050 to +0.0350)", "99%", "1.5000 ± 0.010"):
        assert words in section.body, words
    assert "4,000 simulated" in section.body and "5.1% were called different" in section.body
    assert over_seeds(ReportData(study={**STUDY, "compare": None})) is None


def test_the_map() -> None:
    section = crossover(ReportData(crossover=CROSSOVER))
    assert section is not None and "overtakes at about 170 tokens" in section.body
    assert "3-bit sibling ends at 1.400" in section.body


def test_a_study_alone_makes_a_page() -> None:
    page = render(ReportData(study=STUDY), ReportSettings(title="Study"))
    assert "<h1>finetune accepts more than scratch</h1>" in page


def test_a_file_that_is_json_and_no_result_is_named() -> None:
    """Two of them, too: the first is named."""
    args = Namespace(**dict.fromkeys(ALONE))
    args.study, args.crossover = Path("reports/study.json"), Path("reports/crossover.json")
    settings = ReportSettings(title="Study")
    for broken in ({}, {**STUDY, "arms": {"scratch": None}}, {**STUDY, "compare": ["x"]}):
        with pytest.raises(HarnessError, match=r"where: reports/study.json[\s\S]*run that again"):
            page(ReportData(study=broken), settings, args)
        with pytest.raises(HarnessError, match=r"where: reports/study.json"):
            page(ReportData(study=broken, crossover={"curves": 3}), settings, args)
    with pytest.raises(HarnessError, match=r"where: reports/crossover.json"):
        page(ReportData(study=STUDY, crossover={"curves": 3}), settings, args)
    whole = ReportData(study=STUDY, crossover=CROSSOVER)
    assert page(whole, settings, args) == render(whole, settings)
