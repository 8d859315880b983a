"""Searches and comparisons on tiny data: repeatable, resumable, promotable, or refused."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from eagle3.acceptance import acceptance_length
from eagle3.errors import HarnessError
from experiments.study.bench import Bench
from experiments.study.budget import costs, tokens_for
from experiments.study.opening import prepare
from experiments.study.promote import promote, round_trip
from experiments.study.search import Search, best_trial
from experiments.study.store import SLOT
from stages import train as train_stage
from stages.params import read_params
from stages.runner import run_stage
from tests.settings_of import change
from tests.tiny_study import ARMS, run, save_checkpoint, study_of


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
    for child in children:
        said = child.data.tags["mlflow.note.content"]
        assert "Drafter **" in said
        assert f"{int(child.data.params['tokens']):,} training tokens" in said
        if "given_up" in child.data.tags:
            assert "Given up after" in said
        else:
            assert f"**τ {child.data.metrics['tau']:.3f}** on " in said
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


def test_documents_without_an_answer_within_reach(project: Path) -> None:
    """No budget is ever spent on them: it would be sought for without end."""
    change(project, train={"max_length": 3})
    with pytest.raises(HarnessError, match=r"nothing to learn from[\s\S]*first 3"):
        run(project)
    assert not list(project.glob("studies.db*"))


def test_promote_without_a_study(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    with pytest.raises(HarnessError, match=r"no study has been made[\s\S]*eagle3 study"):
        promote(project, name=None, storage=None, arms=None, keep_budget=False)
    assert (project / "params.yaml").read_text() == before
    assert not list(project.glob("studies.db*"))


def test_a_name_that_is_none(project: Path) -> None:
    with pytest.raises(HarnessError, match=r"--name[\s\S]*name = 'a b'"):
        prepare(project, "a b")


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


def test_the_command_says_what_is_wrong(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `python -m experiments.study` does, in this process."""
    monkeypatch.setattr(sys, "argv", ["study", "--storage", "redis://x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("experiments.study", run_name="__main__")
    assert ended.value.code == 2 and "cannot be kept there" in capsys.readouterr().err
