"""Studies on tiny data: repeatable, resumable, promotable, and refused before they begin."""

from __future__ import annotations

import html
import io
import json
import logging
import math
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from eagle3.acceptance import acceptance_length
from eagle3.errors import HarnessError
from eagle3.report.data import ReportData
from eagle3.report.scaling import scaling as draw_scaling
from eagle3.seed_statistics import Components, power
from eagle3.tracking import NullTracker
from experiments.study import calibration, crossover, scaling, store, tracking, work
from experiments.study.bench import Bench
from experiments.study.budget import costs, tokens_for
from experiments.study.fixed import Fixed
from experiments.study.opening import prepare, reach
from experiments.study.promote import promote, round_trip
from experiments.study.run import open_searches, run_study
from experiments.study.search import Search, best_trial
from experiments.study.store import SLOT
from stages import train as train_stage
from stages.params import dump_yaml, overlaid, read_params, read_yaml
from stages.runner import run_stage
from tests.tiny_study import make_project, save_checkpoint, use_store

ARMS = ("scratch", "finetune")


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """A study's run is in the store at once, since its trainings wait for that; and the library,
    which studies quieten, speaks again to the tests that come after."""
    log = logging.getLogger("eagle3")
    before = log.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "FLUSH_SECONDS", 0.05)
        yield
    log.setLevel(before)


@pytest.fixture(scope="module")
def template(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_verifier: Path,
    project_root: Path,
    empty_store: Path,
) -> Path:
    folder = make_project(tmp_path_factory.mktemp("study") / "p", tiny_verifier, project_root)
    use_store(folder, empty_store)
    return folder


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "project"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder


def change(project: Path, **sections: Any) -> None:
    params = overlaid(read_params(project / "params.yaml"), sections, where=Path("test"))
    (project / "params.yaml").write_text(dump_yaml(params))


def run(project: Path, *, with_comparison: bool = False, **options: Any) -> None:
    given = {"name": None, "storage": None, "finetune_from": None, "workers": 1, **options}
    run_study(project, with_comparison=with_comparison, **given)


def study_of(project: Path, name: str, url: str | None = None) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=url or f"sqlite:///{project}/studies.db")


def outcome(project: Path, url: str | None = None) -> list[tuple[Any, ...]]:
    return [
        (t.user_attrs[SLOT], t.state, t.value, t.params, t.intermediate_values)
        for arm in ARMS
        for t in study_of(project, f"default.{arm}", url).get_trials()
    ]


@pytest.fixture(scope="module")
def done(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole study with its comparison."""
    folder = tmp_path_factory.mktemp("done") / "project"
    shutil.copytree(template, folder)
    run(folder, with_comparison=True)
    return folder


def test_what_a_study_leaves(done: Path) -> None:
    found = json.loads((done / "reports" / "study.json").read_text())
    assert set(found["arms"]) == set(ARMS) and found["seconds"] > 0
    for arm in ARMS:
        about = found["arms"][arm]
        study = study_of(done, f"default.{arm}")
        assert about["trials"] == 4 == len(study.trials)
        assert about["pruned"] == sum(t.state == TrialState.PRUNED for t in study.trials)
        assert about["best_tau"] == study.best_value >= about["default_tau"]
        assert about["default_tau"] == study.trials[0].value
        # The present settings went first.
        first = study.trials[0].params
        assert first["lr"] == 5.0e-3 and first["objective.ttt_steps"] == 2
        assert "noise.std (uniform_abs)" not in first
    record = found["provenance"]
    assert record["settings"]["study"]["cost"] == 1500 and record["seed"] == 0
    assert "experiments/study/training.py" in record["code"] and record["inputs"] == {}  # no DVC
    assert [run["name"] for run in record["mlflow_runs"]] == ["study default"]
    compare = found["compare"]
    assert compare["seeds"] == 2 and compare["low"] <= compare["delta"] <= compare["high"]
    assert "2 seeds" in compare["verdict"]
    runs = {
        (t.user_attrs["arm"], t.user_attrs["seed"]): t
        for name in optuna.get_all_study_names(f"sqlite:///{done}/studies.db")
        if "compare" in name
        for t in study_of(done, name).trials
        if t.user_attrs["role"] == "equal budget"
    }
    assert set(runs) == {(arm, seed) for arm in ARMS for seed in (1, 2)}
    differences = [runs["finetune", s].value - runs["scratch", s].value for s in (1, 2)]
    assert compare["by_benchmark"]["all"]["differences"] == pytest.approx(differences)
    assert compare["delta"] == pytest.approx(sum(differences) / 2)
    # Budgets: the checkpoint's 300 rows stand alone, and scratch had them on top.
    tokens = {row["name"]: row["tokens"] for row in compare["costs"]}
    assert tokens["what finetune starts from"] == 300
    assert tokens["scratch, larger budget"] == tokens["scratch"] + 300


def test_trials_stand_below_their_study_in_mlflow(done: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{done}/mlflow.db")
    experiment = client.get_experiment_by_name("eagle3")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "study"]
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == len(runs) - 1 == 4 + 4 + 4 + 2  # both searches, the comparison
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.tags["mlflow.source.git.commit"] for run in runs} == {"none"}  # outside git
    assert all(run.data.tags["torch.version"] == torch.__version__ for run in runs)
    told = parent.data.tags["mlflow.note.content"]
    found = json.loads((done / "reports" / "study.json").read_text())
    assert found["provenance"]["mlflow_runs"][0]["run_id"] == parent.info.run_id
    assert told.startswith("Which settings are best for scratch and finetune? 4 trials of each")
    assert told.endswith("study.html, under Artifacts.")
    for arm in ARMS:
        best = study_of(done, f"default.{arm}").best_value
        assert f"**{arm}**: dev τ {best:.3f} with " in told
    for run in children:
        said = run.data.tags["mlflow.note.content"]
        assert "Drafter **" in said
        assert f"{int(run.data.params['tokens']):,} training tokens" in said
        if "given_up" in run.data.tags:
            assert "Given up after" in said
        else:
            assert f"**τ {run.data.metrics['tau']:.3f}** on " in said
    for arm in ARMS:
        curve = client.get_metric_history(parent.info.run_id, f"best_dev_tau.{arm}")
        values = [point.value for point in sorted(curve, key=lambda point: point.step)]
        assert values == sorted(values)
        assert values[-1] == study_of(done, f"default.{arm}").best_value
    kept = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert kept == {"study.json", "study.html"}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trials(done: Path, project: Path) -> None:
    run(project)
    assert outcome(project) == outcome(done)


@pytest.mark.slow
def test_a_stopped_study_goes_on(
    project: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third trial: its slot comes back as it was; nothing is counted twice."""
    original = Search.run
    calls = []

    def stopping(self: Search, trial: optuna.Trial, tracker: Any) -> float:
        calls.append(trial)
        value = original(self, trial, tracker)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return value

    monkeypatch.setattr(Search, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(project)
    monkeypatch.setattr(Search, "run", original)
    run(project)
    for arm in ARMS:
        trials = study_of(project, f"default.{arm}").trials
        ended = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        assert sorted(t.user_attrs[SLOT] for t in ended) == [0, 1, 2, 3]
    stopped = calls[2]
    trials = study_of(project, f"default.{stopped.study.study_name.split('.')[1]}").trials
    assert trials[stopped.number].state == TrialState.FAIL
    (again,) = [t for t in trials if t.user_attrs[SLOT] == 1 and t.state != TrialState.FAIL]
    assert again.params == trials[stopped.number].params
    found = json.loads((project / "reports" / "study.json").read_text())["arms"]
    assert [found[arm]["trials"] for arm in ARMS] == [4, 4]


def test_promoting_leaves_the_rest_as_it_was_written(project_root: Path) -> None:
    text = (project_root / "params.yaml").read_text()
    yaml = round_trip()
    out = io.StringIO()
    yaml.dump(yaml.load(text), out)
    assert out.getvalue() == text


def test_promoted_settings_repeat_the_trial(done: Path, project: Path) -> None:
    """The train stage gives the winning trial's dev τ to the last bit; comments stay."""
    shutil.copy(done / "studies.db", project / "studies.db")
    path = project / "params.yaml"
    path.write_text(path.read_text().replace("\narms:", "\n# both arms\narms:"))
    promote(project, name=None, storage=None, arms=None, keep_budget=False)
    assert "# both arms" in path.read_text()
    params = read_params(path)
    for arm in ARMS:
        best = best_trial(study_of(done, f"default.{arm}"))
        assert best is not None
        promoted = params["study"]["promoted"]
        assert promoted["dev_tau"][arm] == best.value and len(promoted["digest"].split()) == 2
        run_stage(
            "train",
            train_stage.main,
            train_stage.add_arguments,
            [
                "--arm",
                arm,
                "--parity",
                "parity.json",
                "--out",
                f"checkpoints/{arm}",
                "--curve",
                f"metrics/{arm}.curve.jsonl",
            ],
        )
        lines = (project / "metrics" / f"{arm}.curve.jsonl").read_text().splitlines()
        taus = [i["value"] for i in map(json.loads, lines) if i["metric"] == "dev_tau"]
        assert taus == [best.value]


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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"space": {"learning_rate": {"low": 1, "high": 2}}}, r"does not have[\s\S]*learning_rate"),
        ({"space": {"noise": {"low": 1, "high": 2}}}, r"does not have[\s\S]*got: noise"),
        ({"space": {"beta2": {"low": 0.99, "high": 0.9}}}, r"beta2[\s\S]*range is empty"),
        ({"space": {"scheduler": {"choices": []}}}, r"scheduler[\s\S]*range is empty"),
        ({"space": {"clip": {"low": 2.0, "high": 3.0}}}, r"leaves out the present[\s\S]*got: 1.0"),
        ({"space": {"beta2": {"low": 0.9, "high": 1.5}}}, r"beta2[\s\S]*less than 1"),
        ({"arms": {"nobody": {}}}, r"an arm that there is not[\s\S]*nobody"),
        ({"rungs": [0.5, 0.5]}, "ascend"),
    ],
)
def test_settings_that_are_refused(project: Path, sections: Any, message: str) -> None:
    change(project, study=sections)
    with pytest.raises(HarnessError, match=message):
        run(project)
    assert not (project / "reports").exists()
    assert not list(project.glob("studies.db*"))


def test_a_checkpoint_that_does_not_fit(project: Path, tiny_verifier: Path) -> None:
    bench = Bench(project)
    save_checkpoint(project / "mine", bench.arm("scratch").data, seed=9)
    config = json.loads((project / "mine" / "config.json").read_text())
    for key in ("hidden_size", "target_hidden_size"):
        config[key] = 2 * config[key]
    (project / "mine" / "config.json").write_text(json.dumps(config))
    with pytest.raises(HarnessError, match="mine"):
        run(project, finetune_from=project / "mine")
    with pytest.raises(HarnessError, match="nothing to start from"):
        run(project, finetune_from=project / "no such checkpoint")
    assert not list(project.glob("studies.db*"))


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


def test_promote_without_a_study(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    with pytest.raises(HarnessError, match=r"no study has been made[\s\S]*eagle3 study"):
        promote(project, name=None, storage=None, arms=None, keep_budget=False)
    assert (project / "params.yaml").read_text() == before
    assert not list(project.glob("studies.db*"))


@pytest.mark.slow
def test_given_trainings_side_by_side(
    done: Path, project: Path, monkeypatch: pytest.MonkeyPatch, project_root: Path
) -> None:
    """Room for two threads: two processes of one each, and the same τ as one process gives."""
    shutil.copy(done / "studies.db", project / "studies.db")
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


@pytest.mark.parametrize("url", ["redis://here", "sqlite", "mysql://u:secret@h/d"])
def test_stores_of_another_kind(project: Path, url: str) -> None:
    with pytest.raises(HarnessError, match="cannot be kept there") as raised:
        run(project, storage=url)
    assert "secret" not in str(raised.value)


def test_a_server_whose_port_is_no_number(project: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be reached") as raised:
        store.open_store(store.store_url(project, "postgresql://ann:secret@host:port/db"), 15)
    assert "host:port/db" in str(raised.value) and "secret" not in str(raised.value)


def test_a_name_that_is_none(project: Path) -> None:
    with pytest.raises(HarnessError, match=r"--name[\s\S]*name = 'a b'"):
        prepare(project, "a b")


def test_a_store_that_is_not_one(project: Path) -> None:
    (project / "studies.db").write_text("poetry")
    with pytest.raises(HarnessError, match="cannot be reached"):
        run(project)


def test_other_data_or_settings_are_another_study(done: Path, project: Path) -> None:
    shutil.copy(done / "studies.db", project / "studies.db")
    change(project, study={"cost": 1600})
    with pytest.raises(HarnessError, match=r"changed: search: cost[\s\S]*--name"):
        run(project)
    change(project, study={"cost": 1500})
    index = project / "data" / "hidden_states" / "dev" / "index.jsonl"
    before = index.read_text()
    index.write_text(before.replace(": ", ":"))  # other bytes
    with pytest.raises(HarnessError, match=r"changed: data: .*dev/index.jsonl"):
        run(project)
    index.write_text(before)
    change(project, study={"trials": 5})  # more of the same is the same study
    searches = open_searches(reach(prepare(project), None))
    assert [len(search.study.trials) for search in searches] == [5, 5]


def test_budget_counts_supervised_rows_times_steps() -> None:
    from eagle3.schedule import plan_steps
    from eagle3.train_settings import TrainSettings

    lengths, rows = [10, 12, 8, 15], [5, 6, 2, 9]
    for steps in (1, 3):
        settings = TrainSettings.model_validate(
            {"lr": 1.0, "batch_tokens": 20, "objective": {"ttt_steps": steps}}
        )
        tokens, spent = tokens_for(40, lengths, rows, settings, seed=1)
        plan = plan_steps(
            lengths, batch_tokens=20, max_length=2048, accumulate=1, seed=1,
            tokens=tokens, epochs=None,
        )  # fmt: skip
        seen = [i for step in plan for batch in step.batches for i in batch]
        assert tokens == sum(lengths[i] for i in seen) == plan[-1].tokens_after
        assert spent == steps * sum(rows[i] for i in seen) >= 40
        assert costs(plan, rows, steps)[-2] < 40  # one step less would not spend it


def test_a_diverged_trial_counts_as_nothing_accepted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3.finite import LossNotFinite

    def diverge(self: Search, trial: optuna.Trial, tracker: Any) -> float:
        trial.set_user_attr("cost", 1)
        trial.set_user_attr("tokens", 1)
        trial.set_user_attr("train", {})
        raise LossNotFinite("the loss is not finite")

    monkeypatch.setattr(Search, "run", diverge)
    change(project, study={"trials": 1})
    run(project)
    assert [o[2] for o in outcome(project)] == [acceptance_length(0, 10)] * 2


class Quiet:
    """A listener."""

    def began(self, kind: Any, trial: Any) -> None: ...

    def update(self) -> None: ...


def test_a_slot_taken_over_is_not_told_twice(project: Path) -> None:
    """A worker that was silent too long wakes up: what it says of its slot is dropped."""
    change(project, study={"trials": 1})
    place = reach(prepare(project), None)
    search = open_searches(place)[0]
    trial = store.claim(search.study, place.storage, place.url)
    assert trial is not None
    search.run(trial, NullTracker())
    place.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)  # as others see it
    assert not store.tell(search.study, trial, 2.0, TrialState.COMPLETE)
    # Nobody put it back: opening the study again queues the slot anew.
    again = open_searches(place)[0]
    work.work_through(place, [again], Quiet())
    states = [t.state for t in again.study.trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_fresh_store_met_by_several(tmp_path: Path, project_root: Path) -> None:
    code = (
        "import sys; from experiments.study.store import open_store, open_study, claim\n"
        "url = sys.argv[1]; s = open_store(url, 15)\n"
        "study = open_study(s, url, 'x', {'a': 1}, [({}, {}) for _ in range(6)])\n"
        "while (t := claim(study, s, url)) is not None: study.tell(t, 1.0)\n"
    )
    url = f"sqlite:///{tmp_path}/fresh.db"
    environment = {**os.environ, "PYTHONPATH": str(project_root)}
    command = [sys.executable, "-c", code, url]
    several = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in several] == [0, 0, 0]
    trials = study_of(tmp_path, "x", url).trials
    assert sorted(t.user_attrs[SLOT] for t in trials) == list(range(6))
    assert {t.state for t in trials} == {TrialState.COMPLETE}


def test_the_command_says_what_is_wrong(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `python -m experiments.study` does, in this process."""
    monkeypatch.setattr(sys, "argv", ["study", "--storage", "redis://x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("experiments.study", run_name="__main__")
    assert ended.value.code == 2 and "cannot be kept there" in capsys.readouterr().err
