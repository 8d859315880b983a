"""`dvc exp run --temp` and its queue delete their folders at the end; the MLflow runs made there
stay, under the experiments' names."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stages import sending
from stages.system_metrics import PREFIX
from stages.tracking import Store
from tests.small_pipeline import commit_all, dvc, git, write_pipeline

STAGE = """
from pathlib import Path
from stages.runner import run_stage

def main(stage, args):
    stage.tracker("scratch").log_metrics({"loss": 1.5}, 0)
    Path("out").write_text(str(Path.cwd()))

run_stage("train", main, lambda parser: None)
"""
FILES = {
    "stage.py": STAGE,
    "params.yaml": "run: {threads: 1, seed: 0, device: cpu}\n",
    "dvc.yaml": "stages: {train: {cmd: python stage.py, deps: [stage.py], params: [run], "
    "outs: [out]}}\n",
    ".gitignore": "/out\n/mlflow.db*\n/mlartifacts\n/.work\n/provenance\n__pycache__\n",
}


@pytest.mark.slow
def test_runs_inside_a_temporary_experiment_survive(tmp_path: Path, project_root: Path) -> None:
    write_pipeline(tmp_path, FILES)
    commit_all(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": str(project_root),
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.com",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.com",
    }
    for command in (
        ["exp", "run", "--temp", "--name", "at-once"],
        ["exp", "run", "--queue", "--name", "queued", "--set-param", "run.seed=1"],
        ["queue", "start"],
    ):
        dvc(tmp_path, *command, environment=environment)
    store = Store(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "mlartifacts")
    assert store.database is not None and store.database.exists()
    client, experiment = sending.open_client(store)
    deadline = time.monotonic() + 120  # the queue's worker is a process of its own
    while True:
        runs = client.search_runs([experiment], "attributes.status = 'FINISHED'")
        if len(runs) == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    by_name = {run.data.tags["dvc_experiment"]: run for run in runs}
    assert by_name.keys() == {"at-once", "queued"}
    # A slow machine gives a stage that lasts ten seconds, and with it samples of the machine.
    said = [{k: v for k, v in run.data.metrics.items() if not k.startswith(PREFIX)} for run in runs]
    assert said == [{"loss": 1.5}, {"loss": 1.5}]
    assert [by_name[name].data.tags["seed"] for name in ("at-once", "queued")] == ["0", "1"]
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert {run.data.tags["dvc_baseline"] for run in runs} == {head}
