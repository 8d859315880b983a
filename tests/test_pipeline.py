"""The whole DVC graph on a tiny random verifier: what runs, what does not run again, sharing."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.tracking import flatten
from experiments import overlay, verify_command
from experiments.differences import SETTINGS, differences
from experiments.lineage_command import as_text
from experiments.overlay import project_files
from experiments.settings_check import check_settings
from stages.lineage import Lineage
from stages.params import dump_yaml, overlaid, read_params
from tests.small_pipeline import git
from tests.tiny import make_tiny_verifier
from tests.warm_python import WarmPython

ARMS = ("base", "scratch", "finetune", "scratch_large")
FROM_OUTSIDE = {
    "verifier": {"verifier"},
    "prompts": {"prompts.jsonl", "mt_bench.jsonl", "human_eval.jsonl"},
}


def tiny_settings(folder: Path) -> dict[str, object]:
    """What differs from params.yaml; verifier and prompts lie in `folder`."""
    return {
        "run": {"threads": 1},
        "verifier": {"source": str(folder / "verifier")},
        "prompts": {
            "source": str(folder / "prompts.jsonl"),
            "count": None,
            "dev_share": 0.25,
            "writing": None,
            "test": [
                {"name": "mt_bench", "path": str(folder / "mt_bench.jsonl"), "key": "text"},
                {"name": "human_eval", "path": str(folder / "human_eval.jsonl"), "key": "text"},
            ],
        },
        "regenerate": {"max_new_tokens": 24, "slots": 8, "wave": 16, "workers": 2},
        "sibling_regenerate": {"limit": 10, "max_new_tokens": 24, "slots": 8, "wave": 16},
        "extract": {"aux_layers": [0, 2, 3]},
        "vocab": {"size": 128},
        "sibling_vocab": {"size": 128},
        "train": {"batch_tokens": 256, "evaluations": 1, "log_every": 1},
        "arms": {name: {"tokens": 1500} for name in ARMS},
        "evaluate": {"decode_prompts": 2, "decode_tokens": 8},
        "compare": {"resamples": 200},
        "report": {},
    }


class Project:
    """A clone of the project's files, and DVC in it."""

    def __init__(self, root: Path, python: WarmPython) -> None:
        self.root = root
        self.python = python
        self.ran_first: set[str] = set()
        # DVC's queue starts `dvc` itself, by name.
        places = [str(python.bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        path = os.pathsep.join(places)
        self.environment = {**os.environ, "PATH": path, "COLUMNS": "300"}
        self.environment.pop("PYTHONPATH", None)

    def git(self, *command: str) -> str:
        return git(self.root, *command)

    def dvc(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *command],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def repro(self) -> set[str]:
        """Names of the stages that ran."""
        return set(re.findall(r"Running stage '([^']+)'", self.dvc("repro")))

    def set_params(self, params: dict[str, object]) -> None:
        (self.root / "params.yaml").write_text(dump_yaml(params))


def write_prompts(folder: Path) -> None:
    animals = ("fox", "owl", "hare", "toad", "wren", "mole", "newt", "lynx", "crow", "seal")
    actions = ("counts stones", "crosses a river", "learns to sing", "loses a shoe")
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"Tell me how a {who} {what}."}]})
        for who in animals
        for what in actions
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    for name, text in (("mt_bench", "What is a {}?"), ("human_eval", "def {}(items):")):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text.format(who)}) + "\n" for who in animals[:4])
        )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    made = WarmPython(tmp_path_factory.mktemp("python"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    project_root: Path,
    empty_store: Path,
    python: WarmPython,
) -> Project:
    """Cloned, and its pipeline run once."""
    folder = tmp_path_factory.mktemp("pipeline")
    make_tiny_verifier(folder / "verifier")
    write_prompts(folder)
    made = Project(folder / "project", python)
    for name in [*project_files(project_root), ".dvc/config", ".dvc/.gitignore"]:
        (made.root / name).parent.mkdir(parents=True, exist_ok=True)
        (made.root / name).write_bytes((project_root / name).read_bytes())
    params = overlaid(
        read_params(project_root / "params.yaml"), tiny_settings(folder), where=Path("tiny")
    )
    check_settings(params, "tiny")
    made.set_params(params)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        made.git(*command)
    shutil.copy(empty_store, made.root / "mlflow.db")
    made.ran_first = made.repro()
    made.git("add", ".")
    made.git("commit", "-qm", "results")
    return made


def test_everything_runs_once(project: Project) -> None:
    every = {line.split()[0] for line in project.dvc("stage", "list").splitlines()}
    assert project.ran_first == every
    assert (project.root / "report" / "report.html").stat().st_size > 1000
    assert project.repro() == set()


def test_what_the_summary_says(project: Project) -> None:
    summary = json.loads((project.root / "metrics" / "summary.json").read_text())
    flat = json.dumps(summary)
    for arm in ARMS:
        taus = summary["tau"][arm]
        assert set(taus) >= {"mt_bench", "human_eval"}
        assert all(1.0 <= tau <= 4.0 for tau in taus.values())
        assert summary["speedup"][arm] > 0
    assert set(summary["compare"]) >= {"arms", "delta", "low", "high", "verdict"}
    assert summary["compare"]["verdict"] in (*summary["compare"]["arms"], "no difference")
    assert set(summary["greedy_exact"]) >= {"prompts", "equal", "near_ties"}
    assert set(summary["seconds"]) >= {"verifier", "extract", "train@scratch", "evaluate@base"}
    assert str(project.root) not in flat


def test_every_run_is_in_mlflow(project: Project) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project.root}/mlflow.db")
    experiment = client.get_experiment_by_name("eagle3")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    by_stage = {run.data.tags["dvc_stage"]: run for run in runs}
    wanted = {f"{stage}@{arm}" for stage in ("train", "evaluate") for arm in ARMS} | {"report"}
    assert set(by_stage) == wanted and len(runs) == len(wanted)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD~1"], cwd=project.root, capture_output=True, text=True
    ).stdout.strip()
    for name, run in by_stage.items():
        assert run.info.status == "FINISHED", name
        assert run.data.tags["mlflow.source.git.commit"] == head
        assert run.data.tags["git_dirty"] == "false"  # what DVC rewrites does not count
        assert any(tag.startswith("data.") for tag in run.data.tags), name
    assert by_stage["train@scratch"].data.metrics
    for name, said in (
        ("train@scratch", ("**scratch**, from scratch", "dev τ", "`checkpoints/scratch`")),
        ("train@finetune", ("finetuned from `checkpoints/base`",)),
        ("evaluate@finetune", ("test prompts", "break-even", "`metrics/finetune.jsonl`")),
    ):
        note = by_stage[name].data.tags["mlflow.note.content"]
        assert all(part in note for part in said), note
    models = client.search_logged_models([experiment.experiment_id])
    assert sorted((model.name, model.source_run_id) for model in models) == sorted(
        (f"drafter_{arm}", by_stage[f"train@{arm}"].info.run_id) for arm in ARMS
    )
    for model in models:
        assert {metric.dataset_name for metric in model.metrics} == {"data/hidden_states"}
        assert {metric.key for metric in model.metrics} >= {"tau.all", "speedup"}


@pytest.mark.slow
def test_a_clean_clone_makes_the_same(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All but times and run ids, to the bit, without the run cache."""
    monkeypatch.setenv("PATH", project.environment["PATH"])
    monkeypatch.chdir(project.root)
    code = verify_command.run(project.root, [], as_json=True, keep=False)
    found = json.loads(capfd.readouterr().out)
    apart = [item for item in found["outs"] if item["state"] not in ("bitwise", "not compared")]
    assert apart == [] and code == 0
    left_out = {item["path"] for item in found["outs"] if item["state"] == "not compared"}
    assert left_out == {*(f"metrics/{arm}.timing.json" for arm in ARMS), "report/report.html"}
    assert found["environment"].keys() <= {"commit"}  # the results were committed meanwhile


def test_lineage_of_a_metric(project: Project) -> None:
    lineage = Lineage(project.root)
    steps = lineage.chain(lineage.find("tau.finetune.all").entry)
    by_name = {step.stage: step for step in steps}
    assert steps[0].stage == "evaluate@finetune" and steps[-1].stage == "verifier"
    assert {"train@finetune", "train@base", "extract", "prompts", "sibling"} <= by_name.keys()
    assert not any(step.reused for step in steps)
    for step in steps:
        given = {Path(path).name for path, (_, maker) in step.needs.items() if maker is None}
        assert given == FROM_OUTSIDE.get(step.stage, set()), step.stage
        assert len(step.runs) == (step.stage.split("@")[0] in ("train", "evaluate")), step.stage
    run = by_name["train@finetune"].runs[0]
    assert lineage.find(run).entry.name == "train@finetune"
    asked = lineage.find(str(project.root / "checkpoints/scratch"))
    text = as_text(asked, lineage.chain(asked.entry))
    rate = read_params(project.root / "params.yaml")["train"]["lr"]
    assert f"\n  setting train.lr: {rate}\n" in text


def test_prompts_that_change_behind_their_path(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`eagle3 repro` runs their stage again; here it makes the same of them, so all else stands."""
    monkeypatch.setenv("PATH", project.environment["PATH"])
    source = project.root.parent / "prompts.jsonl"
    before = source.read_text()

    def run() -> set[str]:
        assert overlay.run_default(project.root) == 0
        return set(re.findall(r"Running stage '([^']+)'", capfd.readouterr().out))

    assert run() == set()
    source.write_text(before + before.splitlines()[0] + "\n")  # one of them again
    assert run() == {"prompts", "report"}  # which shows the new record
    assert run() == set() and project.repro() == set()
    source.write_text(before)
    assert run() >= {"prompts"}


def test_an_arms_learning_rate_reruns_that_arm(project: Project) -> None:
    before = read_params(project.root / "params.yaml")
    changed = overlaid(
        before, {"arms": {"scratch": {"train": {"lr": 1.0e-4}}}}, where=Path("change")
    )
    project.set_params(changed)
    # The export and the evaluation of that arm follow, then what reads all arms.
    arm = {f"{stage}@scratch" for stage in ("train", "export", "evaluate")}
    assert project.repro() == {*arm, "compare", "report"}
    project.set_params(before)
    # Back again: all of it lies in the run cache, but for the report, whose summary is in git.
    assert project.repro() <= {"report"}


@pytest.mark.slow
def test_a_queued_experiment(project: Project) -> None:
    """Queue, run, list and compare it; its runs are in the same store, under its name."""
    changed = "arms.scratch_large.tokens"
    project.dvc("exp", "run", "--queue", "--name", "shorter", "-S", f"{changed}=1000")
    project.dvc("exp", "run", "--run-all")
    assert re.search(r"shorter .*Success", project.dvc("queue", "status"))
    rows = list(csv.DictReader(project.dvc("exp", "show", "--csv").splitlines()))
    by_name = {row["Experiment"] or row["rev"]: row for row in rows}
    assert (by_name["shorter"][changed], by_name["workspace"][changed]) == ("1000", "1500")
    assert 1.0 <= float(by_name["shorter"]["tau.scratch_large.all"]) <= 4.0
    # For people: what differs, and nothing else.
    shown = project.dvc("exp", "show", "--only-changed", "--no-pager")
    assert changed in shown and "speedup.scratch_large" in shown and "tau.base.all" not in shown

    (ref,) = project.git("for-each-ref", "--format=%(refname)", "refs/exps/*/*/shorter").split()
    other = flatten(json.loads(project.git("show", f"{ref}:metrics/summary.json")))
    here = flatten(json.loads((project.root / "metrics" / "summary.json").read_text()))
    found = json.loads(project.dvc("metrics", "diff", "shorter", "--json"))
    assert {
        name: (value["old"], value["new"]) for name, value in found["metrics/summary.json"].items()
    } == {name: (other[name], here[name]) for name in here if other[name] != here[name]}
    project.dvc("plots", "diff", "shorter", "-o", ".work/plots")
    drawn = (project.root / ".work" / "plots" / "index.html").read_text()
    for title in ("dev prompts", "training loss", "first draft right", "learning rate"):
        assert title in drawn
    assert '"rev": "shorter"' in drawn and '"rev": "workspace"' in drawn

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project.root}/mlflow.db")
    runs = client.search_runs(["1"], "tags.dvc_experiment = 'shorter'")
    assert {run.info.run_name for run in runs} == {
        *("train scratch_large", "evaluate scratch_large", "report")
    }
    lineage = Lineage(project.root)
    train = next(run for run in runs if run.info.run_name == "train scratch_large")
    steps = [
        lineage.chain(lineage.find(asked).entry)
        for asked in (train.info.run_id, str(project.root / "checkpoints/scratch_large"))
    ]
    settings = [item for item in differences(*steps) if item.kind == SETTINGS]
    assert [(item.name, item.one, item.other) for item in settings] == [(changed, 1000, 1500)]
    assert project.repro() == set()  # the workspace is as it was


def test_a_clone_pulls_and_runs_nothing(project: Project, tmp_path: Path) -> None:
    project.dvc("remote", "add", "-d", "shelf", str(tmp_path / "shelf"))
    project.dvc("push", "-q")
    project.git("add", ".")
    project.git("commit", "-qm", "remote")
    clone = Project(tmp_path / "clone", project.python)
    subprocess.run(["git", "clone", "-q", str(project.root), str(clone.root)], check=True)
    clone.dvc("pull", "-q")
    assert clone.repro() == set()
    assert (clone.root / "report" / "report.html").exists()
