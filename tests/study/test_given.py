"""Trainings whose settings are given: calibration, scaling, the crossover map."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

import optuna
import pytest

from eagle3.errors import HarnessError
from eagle3.finite import LossNotFinite
from eagle3.report.data import ReportData
from eagle3.report.scaling import scaling as draw_scaling
from eagle3.seed_statistics import Components, power
from eagle3.tracking import NullTracker
from experiments.study import calibration, crossover, scaling, training
from experiments.study.bench import Bench
from experiments.study.fixed import Fixed
from stages.params import read_yaml
from tests.settings_of import change
from tests.tiny_study import save_checkpoint, study_of


def test_calibration(project: Path) -> None:
    change(project, study={"compare": {"seeds": 5}})
    calibration.run_aa(project, storage=None)
    found = json.loads((project / "reports" / "aa_test.json").read_text())
    assert found["simulations"] == 1000 and found["trained_seeds"] == 8 and found["seeds"] == 5
    assert found["rejected_share"] == pytest.approx(0.05, abs=0.02)
    sd = math.sqrt(2 * Components(**found["components"]).of_a_seed(10))
    assert found["power_at_0.05"] == pytest.approx(power(0.05, sd, 5, 0.95), abs=0.05)
    (name,) = [
        n for n in optuna.get_all_study_names(f"sqlite:///{project}/studies.db") if ".aa-" in n
    ]
    trials = study_of(project, name).trials
    assert found["tau_by_seed"] == pytest.approx([trial.value for trial in trials])
    assert len({trial.value for trial in trials}) > 1  # seeds differ


@pytest.mark.parametrize(
    ("error", "kept"),
    [(HarnessError("the training state could not be saved"), True), (LossNotFinite("inf"), False)],
)
def test_a_training_that_a_full_disk_ended_is_taken_up(
    project: Path, monkeypatch: pytest.MonkeyPatch, error: HarnessError, kept: bool
) -> None:
    def ended(*args: object, work: Path, **named: object) -> None:
        (work / "state-00000004").mkdir()
        raise error

    monkeypatch.setattr(training, "train", ended)
    bench = Bench(project)
    arm = bench.arm("scratch")
    with pytest.raises(type(error)):
        training.train_once(bench, arm, arm.settings({}), seed=1, tokens=100, tracker=NullTracker())
    assert bool(list((project / ".work").glob("*/state-*"))) == kept


@pytest.mark.slow
def test_scaling(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested parts, budgets by the rule, and the law's own words; a second call trains nothing."""
    scaling.run_scaling(project, storage=None, workers=1, target=None)
    found = json.loads((project / "reports" / "scaling.json").read_text())
    assert [point["documents"] for point in found["points"]] == [8, 15, 30, 60]
    arm = Bench(project).arm("scratch")
    rows = sum(arm.data.lengths)
    for point, part in zip(found["points"], (8, 4, 2, 1), strict=True):
        assert point["share"] == 1 / part
        # 2 passes over all of it, and √part times as many over a part.
        assert point["trained_tokens"] == round(2.0 * rows / math.sqrt(part))
    url = f"sqlite:///{project}/studies.db"
    (name,) = [n for n in optuna.get_all_study_names(url) if ".scaling-" in n]
    taus = {
        (t.user_attrs["one_in"], t.user_attrs["seed"]): t.value
        for t in study_of(project, name).trials
    }
    assert [point["by_seed"] for point in found["points"]] == [
        pytest.approx([taus[part, 1], taus[part, 2]]) for part in (8, 4, 2, 1)
    ]
    assert found["measured"] == pytest.approx(sum(found["points"][-1]["by_seed"]) / 2)
    assert found["low"] <= found["predicted"] <= found["high"]
    assert [item["tokens"] for item in found["more"]] == [2 * rows, 10 * rows]
    section = draw_scaling(ReportData(scaling=found))
    assert section is not None and section.body.count("<circle") == 8
    for line in found["words"]:
        assert html.escape(line) in section.body

    monkeypatch.setattr(Fixed, "run", None)
    scaling.run_scaling(project, storage=None, workers=1, target=1.7)
    again = json.loads((project / "reports" / "scaling.json").read_text())
    assert again["points"] == found["points"] and again["target"]["tau"] == 1.7


def test_parts_are_nested(project: Path) -> None:
    bench = Bench(project)
    arm = bench.arm("scratch")
    ids = {}
    for seed in (1, 2):
        for share in (0.25, 0.5, 1.0):
            part = arm.on_part(share, seed)
            ids[seed, share] = {document.id for document in part.data.documents}
            assert part.data.lengths == [len(d.token_ids) for d in part.data.documents]
            assert part.supervised == [int(d.loss_mask.sum()) for d in part.data.documents]
        assert ids[seed, 0.25] < ids[seed, 0.5] < ids[seed, 1.0]
    assert ids[1, 0.25] != ids[2, 0.25] and ids[1, 1.0] == ids[2, 1.0]


def test_crossover_map(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two siblings: the pipeline's own, and one whose drafter an overlay makes."""
    made = []

    def overlay(root: Path, path: Path, *, targets: list[str]) -> int:
        made.append((read_yaml(path), targets))
        folder = root / ".work" / "overlays" / path.stem / "checkpoints" / "base"
        save_checkpoint(folder, Bench(root).arm("scratch").data, seed=8)
        return 0

    monkeypatch.setattr(crossover, "run_overlay", overlay)
    change(project, study={"crossover": {"bits": [4, 3]}})
    crossover.run_crossover(project, storage=None)
    assert made == [({"sibling": {"bits": 4}}, ["train@base"])]
    found = json.loads((project / "reports" / "crossover.json").read_text())
    curves = found["curves"]
    assert list(curves) == ["scratch", "finetune, 4-bit sibling", "finetune, 3-bit sibling"]
    for points in curves.values():
        assert [point["tokens"] for point in points] == [300, 600]
    for bits, about in found["siblings"].items():
        finetune = curves[f"finetune, {bits}-bit sibling"]
        for place, differences in enumerate(about["differences"]):
            mine, theirs = curves["scratch"][place]["by_seed"], finetune[place]["by_seed"]
            pairs = zip(mine, theirs, strict=True)
            assert differences == pytest.approx([one - two for one, two in pairs])


@pytest.mark.parametrize("what", ["crossover", "aa"])
def test_maps_and_calibrations_that_are_refused(project: Path, what: str) -> None:
    """By settings that lack them, and by inputs that are missing; no store is left behind."""
    act = {"crossover": crossover.run_crossover, "aa": calibration.run_aa}[what]
    (project / "data" / "vocab.safetensors").rename(project / "data" / "elsewhere")
    with pytest.raises(HarnessError, match=r"vocab\.safetensors"):
        act(project, storage=None)
    (project / "data" / "elsewhere").rename(project / "data" / "vocab.safetensors")
    if what == "crossover":
        (project / "checkpoints" / "base").rename(project / "checkpoints" / "other")
        with pytest.raises(HarnessError, match="nothing to start from"):
            act(project, storage=None)
    change(project, study={what: None})
    with pytest.raises(HarnessError, match=rf"no study\.{what}"):
        act(project, storage=None)
    assert not list(project.glob("studies.db*")) and not (project / "reports").exists()


@pytest.mark.slow
def test_given_trainings_side_by_side(
    project: Path, monkeypatch: pytest.MonkeyPatch, project_root: Path
) -> None:
    """Room for two threads: two processes of one each, and the same τ as one process gives."""
    change(project, run={"threads": 2})
    monkeypatch.setenv("PYTHONPATH", str(project_root))
    calibration.run_aa(project, storage=None)
    told = json.loads((project / "reports" / "aa_test.json").read_text())
    logs = sorted((project / ".work").glob("study-default.aa-*/worker-*.log"))
    assert len(logs) == 2
    change(project, run={"threads": 1}, study={"name": "alone"})
    calibration.run_aa(project, storage=None)
    alone = json.loads((project / "reports" / "aa_test.json").read_text())
    assert alone["tau_by_seed"] == told["tau_by_seed"]
