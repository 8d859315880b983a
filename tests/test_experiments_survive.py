"""`dvc exp run --temp` deletes its folder at the end; the MLflow run made in it stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages import sending
from stages.tracking import Store

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
    "dvc.yaml": "stages: {train: {cmd: python stage.py, deps: [stage.py], outs: [out]}}\n",
    ".dvc/config": "[core]\n    analytics = false\n",
    ".dvc/.gitignore": "/cache\n/tmp\n/config.local\n",
    ".gitignore": "/out\n/mlflow.db*\n/mlartifacts\n/.work\n/provenance\n__pycache__\n",
}


@pytest.mark.slow
def test_runs_inside_a_temporary_experiment_survive(tmp_path: Path, project_root: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(project_root),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.com",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.com",
    }
    subprocess.run(
        [sys.executable, "-m", "dvc", "exp", "run", "--temp"],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    store = Store(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "mlartifacts")
    assert store.database is not None and store.database.exists()
    client, experiment = sending.open_client(store)
    (run,) = client.search_runs([experiment])
    assert run.data.metrics == {"loss": 1.5} and run.info.status == "FINISHED"
