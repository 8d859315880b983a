"""Results that are committed by hand: what they keep of their origin, and how it is found."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import HarnessError
from experiments import lineage_command
from experiments.benchmarks import decoding
from experiments.evidence import KEY, evidence, of_benchmark
from experiments.evidence_origin import evidence_origin
from stages import provenance
from stages.lineage import Lineage
from stages.tracking import MlflowTracker, Store

LOCK = """
schema: '2.0'
stages:
  extract:
    cmd: python -m stages.extract --name extract
    outs:
    - {path: data/states, md5: aaaa.dir}
  vocab:
    cmd: python -m stages.vocab --name vocab
    deps:
    - {path: data/states, md5: aaaa.dir}
    outs:
    - {path: data/vocab, md5: bbbb}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.lock").write_text(LOCK)
    (tmp_path / "params.yaml").write_text("")
    (tmp_path / "reports").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commit(root: Path, subject: str) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    if not (root / ".git").is_dir():
        subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    subprocess.run([*git, "add", "dvc.lock", "reports"], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", subject], cwd=root, check=True)


def write(path: Path, **found: Any) -> None:
    path.write_text(json.dumps(found))


def record(root: Path, **changes: Any) -> dict[str, Any]:
    about = provenance.describe(root, threads=2, seed=7)
    given = {"inputs": {"data/vocab": "bbbb", "data/states": "old.dir"}, "code": {"a.py": "1"}}
    return evidence(about, settings={"study": {"cost": 5}}, **{**given, **changes})


def test_a_record_leads_back(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(project, "first")
    run = {"name": "study default", "run_id": "f" * 32}
    write(project / "reports/study.json", study="default", provenance=record(project, runs=[run]))
    commit(project, "what was found")
    found = evidence_origin(project, Lineage(project), "reports/study.json")
    assert found is not None
    target, steps, said = found
    assert target.kind == "evidence"
    assert [step.stage for step in steps] == ["reports/study.json", "vocab", "extract"]
    assert steps[0].needs == {"data/vocab": ("bbbb", "vocab"), "data/states": ("old.dir", None)}
    assert steps[0].params == {"study": {"cost": 5}} and steps[0].runs == ["f" * 32]
    assert KEY in json.loads((project / "reports/study.json").read_text())
    assert "diff" not in steps[0].record and len(steps[0].record["commit"]) == 40
    lacks = [text for word, text in said if word == "lacks"]
    assert lacks == ["data/states: extract has made another one since, aaaa.dir"]
    lineage_command.run(project, "reports/study.json", None, as_json=False)
    text = capsys.readouterr().out
    assert "\n  setting study.cost: 5\n" in text and "what was found" in text
    assert "\n  MLflow  " + "f" * 32 + "  study default\n" in text


def test_two_records_are_compared(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project / "reports/study.json", provenance=record(project))
    other = record(project, inputs={"data/vocab": "cccc"}, code={"a.py": "2"})
    write(project / "reports/scaling.json", provenance=other)
    lineage_command.run(project, "reports/study.json", "reports/scaling.json", as_json=False)
    text = capsys.readouterr().out
    assert "Settings: the same" in text and "other code in a.py" in text
    assert "the result reads another data/vocab" in text
    write(project / "reports/aa_test.json", seeds=5)
    with pytest.raises(HarnessError, match="says nothing of its origin"):
        lineage_command.run(project, "reports/study.json", "reports/aa_test.json", as_json=False)


def test_what_an_older_file_lacks(project: Path) -> None:
    write(project / "reports/study.json", digest={"a": "1"}, verifier="V", arms={"a": {"tau": 2}})
    commit(project, "what was found")
    (project / "dvc.lock").write_text(LOCK.replace("bbbb", "dddd"))
    write(project / "reports/study.json", digest={"a": "1"}, verifier="V", arms={"a": {"tau": 3}})
    found = evidence_origin(project, Lineage(project), str(project / "reports/study.json"))
    assert found is not None
    _, steps, said = found
    assert len(steps) == 1 and steps[0].needs == {}
    words = {word: [text for one, text in said if one == word] for word, _ in said}
    assert words["says"] == ['digest.a: "1"', 'verifier: "V"']
    assert "no commit" in words["lacks"][0] and "one digest of all" in words["lacks"][1]
    assert "there is no store here" in words["lacks"][-1]
    assert not (project / "mlflow.db").exists()  # asking makes none
    states, vocab = words["then"]
    assert states.startswith("data/states aaaa.dir in dvc.lock at ") and states.endswith("as now")
    assert vocab.startswith("data/vocab bbbb") and vocab.endswith("another now")
    assert words["git"][0].endswith("what was found")
    assert words["git"][-1] == "changed since, and not committed"


def test_an_older_file_is_found_in_mlflow(
    project: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its run's artifact, whatever was added to the file by hand."""
    shutil.copy(empty_store, project / "mlflow.db")
    store = Store(f"sqlite:///{project}/mlflow.db", project / "mlartifacts")
    path = project / "reports/study.json"
    runs = []
    for tau in (2.0, 3.0):
        write(path, study="default", tau=tau, seconds=1)
        tags = {"kind": "study", "data.data/vocab": "bbbb", "mlflow.source.git.commit": "c" * 40}
        tracker = MlflowTracker(store, project / "j", run_name="study default", tags=tags)
        tracker.log_artifact(path)
        runs.append(str(tracker.close()["run_id"]))
    write(path, study="default", tau=2.0, seconds=2, verifier="V")
    lineage_command.run(project, "reports/study.json", None, as_json=True)
    told = json.loads(capsys.readouterr().out)
    first, *before = told["steps"]
    assert first["stage"] == "reports/study.json" and first["commit"] == "c" * 40
    assert first["needs"] == {"data/vocab": {"md5": "bbbb", "made_by": "vocab"}}
    assert [step["stage"] for step in before] == ["vocab", "extract"]
    assert any(runs[0] in str(said.get("found")) for said in told["said"])


def test_what_is_no_evidence(project: Path) -> None:
    (project / "reports/list.json").write_text("[]")
    (project / "reports/torn.json").write_text("{")
    for asked in ("reports/list.json", "reports/torn.json", "reports/gone.json", "params.yaml"):
        assert evidence_origin(project, Lineage(project), asked) is None, asked


def test_a_benchmarks_record(project_root: Path) -> None:
    args = argparse.Namespace(count=3, out=Path("o.json"), engines=["local"], head=None)
    made = of_benchmark(str(decoding.__file__), args, threads=2)
    assert made["settings"]["arguments"] == {
        "count": 3, "out": "o.json", "engines": ["local"], "head": None,
    }  # fmt: skip
    assert made["threads"] == 2 and made["seed"] is None and made["inputs"] == {}
    assert {"experiments/benchmarks/decoding.py", "eagle3/decode.py"} <= made["code"].keys()
    assert made["mlflow_runs"] == [] and "diff" not in made
    assert json.loads(json.dumps(made)) == made
