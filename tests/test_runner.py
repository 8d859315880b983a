"""A stage as a program: exit codes, provenance, working folder, the run in MLflow."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # noqa: F401  stages that compute have it loaded when they begin
from safetensors import SafetensorError

from eagle3.errors import HarnessError
from eagle3.settings import Settings
from stages.provenance import git_state, input_digests
from stages.runner import RunSettings, Stage, run_stage
from stages.signals import STOPPED


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text(
        "run: {threads: 1, seed: 3, device: cpu}\narms: {a: {head: data/head}}\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    return tmp_path


class Arm(Settings):
    head: str


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path)


def git(folder: Path, *command: str) -> None:
    subprocess.run(["git", "-C", str(folder), *command], check=True, capture_output=True)


def test_a_stage_leaves_its_provenance(project: Path) -> None:
    (project / "dvc.lock").write_text(
        "stages: {a: {cmd: x, outs: [{path: data/in, md5: abc.dir}, {path: data/other, md5: d},"
        " {path: data/head, md5: h}]}}"
    )

    def main(stage: Stage, args: argparse.Namespace) -> None:
        assert stage.run == RunSettings(threads=1, seed=3, device="cpu")
        args.out.write_text("done")
        stage.note("tokens", 5)
        assert stage.section(Arm, "arms.a").head == "data/head"

    def more(parser: argparse.ArgumentParser) -> None:
        arguments(parser)
        parser.add_argument("--states")

    run_stage("train", main, more, ["--out", "x", "--name", "train@a", "--states", "data/in"])
    about = json.loads((project / "provenance" / "train@a.json").read_text())
    assert about["stage"] == "train@a" and about["notes"] == {"tokens": 5}
    assert about["inputs"] == {"data/head": "h", "data/in": "abc.dir"}
    assert about["threads"] == 1 and about["seconds"] >= 0
    assert about["torch"]["version"].startswith("2.")


def test_a_known_mistake_is_a_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(stage: Stage, args: argparse.Namespace) -> None:
        raise HarnessError("prompt file is empty", where="x.jsonl", fix="fill it")

    with pytest.raises(SystemExit) as stopped:
        run_stage("prompts", main, arguments, [])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "prompts: prompt file is empty\n  where: x.jsonl\n  fix: fill it\n"
    )
    assert not (project / "provenance").exists()


def run(main: Callable[[], None]) -> int:
    def stage_main(stage: Stage, args: argparse.Namespace) -> None:
        main()

    with pytest.raises(SystemExit) as stopped:
        run_stage("train", stage_main, arguments, [])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], signals: None, number: int
) -> None:
    assert run(lambda: os.kill(os.getpid(), number)) == STOPPED
    assert capsys.readouterr().err == (
        "train: stopped; the same command takes up what is finished\n"
    )


def test_a_stop_that_code_in_c_makes_an_error_of_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], signals: None
) -> None:
    """As safetensors does, which asks torch for a tensor when the signal comes."""

    def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type") from None

    assert run(main) == STOPPED
    assert capsys.readouterr().err == (
        "train: stopped; the same command takes up what is finished\n"
    )


def test_a_stop_while_the_store_is_waited_for_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], signals: None
) -> None:
    class Slow:
        def close(self, status: str) -> dict[str, str | None]:
            os.kill(os.getpid(), signal.SIGINT)
            return {}

    def main(stage: Stage, args: argparse.Namespace) -> None:
        stage.trackers.append(Slow())  # type: ignore[arg-type]

    with pytest.raises(SystemExit) as stopped:
        run_stage("train", main, arguments, [])
    assert stopped.value.code == STOPPED
    told = capsys.readouterr().err
    assert told.startswith("train: stopped while MLflow took its run") and told.count("\n") == 1
    # What it made is not said to be made: DVC runs it again.
    assert not (project / "provenance").exists()


def test_a_full_disk_is_a_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        Path("/dev/full").write_text("x")

    assert run(full) == 2
    told = capsys.readouterr().err
    assert told.startswith("train: no room left on the disk\n")
    assert "fix: make room and run the same command again" in told

    def unreadable() -> None:
        raise SafetensorError("I/O error: Read-only file system (os error 30)")

    assert run(unreadable) == 2
    assert capsys.readouterr().err.startswith("train: a file may not be written or read\n")


def test_a_disk_that_is_full_when_the_run_ends_is_a_message(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal's last words and the provenance need room too."""

    class Full:
        def close(self, status: str) -> dict[str, str | None]:
            Path("/dev/full").write_text("x")
            return {}

    def main(stage: Stage, args: argparse.Namespace) -> None:
        stage.trackers.append(Full())  # type: ignore[arg-type]
        if args.out:
            args.out.write_text("x")

    for more in ([], ["--out", "/dev/full"]):
        with pytest.raises(SystemExit) as stopped:
            run_stage("train", main, arguments, more)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.startswith("train: no room left on the disk\n")
    assert not (project / "provenance").exists()


def test_a_file_where_a_working_folder_belongs_is_a_message(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".work").write_text("mine")

    def main(stage: Stage, args: argparse.Namespace) -> None:
        with stage.work({}):
            pass

    with pytest.raises(SystemExit) as stopped:
        run_stage("train", main, arguments, [])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"train: a file stands where a folder belongs\n  where: {project / '.work'}\n"
    )
    assert (project / ".work").read_text() == "mine"


def test_a_device_that_is_not_there(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("cpu", "gpu!"))
    assert run(lambda: None) == 2
    told = capsys.readouterr().err
    assert "where: params.yaml, run.device" in told and "got: gpu!" in told


def test_a_failure_before_any_work_leaves_no_folder(project: Path) -> None:
    stage = Stage("train", "stages.train", project)
    with pytest.raises(HarnessError), stage.work({}):
        raise HarnessError("bad input")
    assert list((project / ".work").iterdir()) == []
    with pytest.raises(HarnessError), stage.work({}) as folder:
        (folder / "half").write_text("done")
        raise HarnessError("later")
    with stage.work({}) as folder:
        assert (folder / "half").read_text() == "done"
    assert list((project / ".work").iterdir()) == []


def test_a_stage_reports_to_mlflow(project: Path, empty_store: Path) -> None:
    shutil.copy(empty_store, project / "mlflow.db")

    def main(stage: Stage, args: argparse.Namespace) -> None:
        with stage.work({"lr": 1}) as folder:
            assert folder.is_relative_to(project / ".work")
            tracker = stage.tracker("scratch", {"arm": "scratch"})
            tracker.log_metrics({"loss": 1.5}, 0)

    run_stage("train", main, arguments, [])
    (run,) = json.loads((project / "provenance" / "train.json").read_text())["mlflow_runs"]
    from mlflow import MlflowClient

    found = MlflowClient(tracking_uri=run["store"]).get_run(run["run_id"])
    said = {n: v for n, v in found.data.metrics.items() if not n.startswith("system/")}
    assert said == {"loss": 1.5}
    assert found.data.metrics["system/process_memory_megabytes"] > 10
    assert found.data.tags["arm"] == "scratch" and found.data.tags["dvc_stage"] == "train"


def test_work_depends_on_the_code(project: Path) -> None:
    code = project / "stages" / "train.py"
    code.parent.mkdir()
    seen = set()
    for text in ("a = 1", "a = 2"):
        code.write_text(text)
        with Stage("train", "stages.train", project).work({}) as folder:
            seen.add(folder.name)
    assert len(seen) == 2


def test_dirtiness_is_about_code(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.email", "a@example.com")
    git(tmp_path, "config", "user.name", "a")
    (tmp_path / "metrics").mkdir()
    for name in ("dvc.lock", "metrics/summary.json", "code.py"):
        (tmp_path / name).write_text("old")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    # What DVC does to a tree while it runs a stage.
    (tmp_path / "dvc.lock").write_text("new")
    (tmp_path / "metrics" / "summary.json").unlink()
    state = git_state(tmp_path)
    assert state["dirty"] is False and len(state["commit"]) == 40
    (tmp_path / "code.py").write_text("new")
    (tmp_path / "a new file.py").write_text("")
    state = git_state(tmp_path)
    assert state["dirty"] is True
    assert state["changed"] == ["a new file.py", "code.py"]
    assert "+new" in state["diff"] and "dvc.lock" not in state["diff"]


def test_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path)["commit"] is None


def test_inputs_without_a_lock(tmp_path: Path) -> None:
    assert input_digests(tmp_path, ["data/x"]) == {}
