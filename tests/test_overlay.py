"""An overlay runs the changed part only, elsewhere, and leaves the project's results alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.errors import HarnessError
from eagle3.workspace import locked
from experiments import overlay as overlays
from experiments.graph import Graph
from experiments.inputs_check import check_inputs, check_sources
from experiments.overlay import prepare, project_files, run_overlay
from experiments.settings_check import check_settings
from stages.params import overlaid, read_params, read_yaml
from tests.small_pipeline import commit_all, dvc, path_with_python, write_pipeline

ARM = "{init: data/verifier_head.safetensors, states: a, head: a, vocab: a, tokens: 1}"
DVC_YAML = """
stages:
  extract:
    cmd: python make.py extract data/states
    deps: [make.py]
    params: [extract]
    outs: [data/states]
  train:
    cmd: python make.py train checkpoints/a
    deps: [make.py, data/states]
    params: [train]
    outs: [checkpoints/a]
"""
MAKE = """
import os, sys
from pathlib import Path
with Path(os.environ["RAN"]).open("a") as log:
    log.write(sys.argv[1] + " ")
out = Path(sys.argv[2])
out.parent.mkdir(exist_ok=True)
out.write_text(Path("params.yaml").read_text() + os.environ.get("MLFLOW_TRACKING_URI", ""))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    files = {
        "dvc.yaml": DVC_YAML,
        "make.py": MAKE,
        "params.yaml": "extract: {aux_layers: [1, 2, 3]}\ntrain: {lr: 1e-3, epochs: 1}\n",
        ".gitignore": "/data/\n/checkpoints/\n/.work/\n",
        ".dvcignore": ".work\n",
    }
    write_pipeline(root, files)
    commit_all(root)
    (root / "new.py").write_text("not yet in git")
    (tmp_path / "faster.yaml").write_text("train: {lr: 0.5}\n")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setenv("PATH", path_with_python())
    # The small project has none of the real settings.
    monkeypatch.setattr(overlays, "check_settings", lambda params, where: None)
    return root


def ran(project: Path) -> list[str]:
    log = project.parent / "ran"
    done = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return done


def test_an_overlay_end_to_end(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dvc(project, "repro", "-q")
    assert ran(project) == ["extract", "train"]
    theirs = (project / "checkpoints" / "a").read_text()
    overlay = project.parent / "faster.yaml"
    assert run_overlay(project, overlay) == 0
    assert ran(project) == ["train"]  # extract's states came out of the run cache
    folder = project / ".work" / "overlays" / "faster"
    made = (folder / "checkpoints" / "a").read_text()
    assert "lr: 0.5" in made and "epochs: 1" in made
    assert made.endswith(f"sqlite:///{project}/mlflow.db")
    assert f"report:    {folder}/report/report.html" in capfd.readouterr().out
    assert (project / "checkpoints" / "a").read_text() == theirs
    # Nothing changed: nothing runs, here or there.
    assert run_overlay(project, overlay) == 0
    dvc(project, "repro", "-q")
    assert ran(project) == []


def test_the_copy_follows_the_project(project: Path) -> None:
    overlay = project.parent / "faster.yaml"
    folder = prepare(project, overlay)
    assert (folder / "new.py").exists()
    assert "new.py" in project_files(project)
    assert not (folder / ".git").exists()
    stamp = (folder / "make.py").stat().st_mtime_ns
    (folder / "dvc.lock").write_text("its own")
    (project / "new.py").unlink()
    (project / "dvc.lock").write_text("the project's")
    prepare(project, overlay)
    assert not (folder / "new.py").exists()
    assert (folder / "dvc.lock").read_text() == "its own"
    assert (folder / "make.py").stat().st_mtime_ns == stamp
    assert json.loads((folder / ".origin.json").read_text())["overlay"] == "faster.yaml"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train: {learning_rate: 1}", ["train", "learning_rate", "unknown key"]),
        ("vocab: {size: many}", ["vocab", "size = 'many'"]),
        ("arms: {scratch: {train: {lr: -1}}}", ["arms.scratch.train", "lr = -1"]),
        ("arms: {mine: {init: x}}", ["arms.mine", "states", "required"]),
        ("extracting: {}", ["extracting"]),
        ("arms: {finetune: null}", ["compare.arms", "scratch, scratch_large", "got: finetune"]),
        (
            "arms: {scratch_large: null}",
            ["dvc.yaml, compare", "metrics/scratch_large.jsonl", "keep the arm"],
        ),
        ("compare: {arms: [scratch, scratsh]}", ["compare.arms", "got: scratsh"]),
        (f"arms: {{1: {ARM}}}", ["wrong.yaml over params.yaml, arms", "got: 1"]),
        (f"arms: {{a b: {ARM}}}", ["got: 'a b'", "another name"]),
        (f"arms: {{export: {ARM}}}", ["got: 'export'", "is taken"]),
        ("train: {lr: .inf}", ["lr = inf", "finite"]),
        (
            "arms: {finetune: {init: checkpoints/bass}}",
            ["arms.finetune.init", "got: checkpoints/bass", "checkpoints/<arm>"],
        ),
        ("prompts: {source: nowhere/mine.jsonl}", ["prompts.source", "got: nowhere/mine.jsonl"]),
        ("prompts: {source: /nowhere/mine}", ["prompts.source", "or the name of a"]),
        (
            "prompts: {test: [{name: mine, path: nowhere}]}",
            ["prompts.test[0].path", "got: nowhere", "a file that is there"],
        ),
    ],
)
def test_a_mistake_is_named_before_anything_runs(
    tmp_path: Path, project_root: Path, text: str, parts: list[str]
) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_bytes((project_root / name).read_bytes())
    overlay = tmp_path / "wrong.yaml"
    overlay.write_text(text)
    with pytest.raises(HarnessError) as caught:
        prepare(tmp_path, overlay)
    for part in ["wrong.yaml", *parts]:
        assert part in str(caught.value)
    assert not (tmp_path / ".work").exists()


def test_what_git_ignores_is_reached_from_the_copy(project: Path) -> None:
    """A drafter in an ignored folder is a link there, and what it links to counts."""
    dvc_yaml = """
stages:
  train:
    foreach: ${arms}
    do:
      cmd: python make.py ${key} checkpoints/${key}
      deps: [make.py, "${item.init}"]
      outs: ["checkpoints/${key}"]
"""
    (project / "dvc.yaml").write_text(dvc_yaml)
    (project / "params.yaml").write_text(
        "arms: {a: {init: data/mine, head: make.py, states: make.py, vocab: make.py}}\n"
    )
    mine = project / "data" / "mine"
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("{}")
    overlay = project.parent / "faster.yaml"
    overlay.write_text("extract: {aux_layers: [1]}\n")
    assert run_overlay(project, overlay) == 0
    assert ran(project) == ["a"]
    (mine / "config.json").write_text("[]")
    assert run_overlay(project, overlay) == 0
    assert ran(project) == ["a"]
    overlay.write_text("arms: {a: {init: ../project/data/mine}}\n")
    with pytest.raises(HarnessError, match=rf"arms.a.init[\s\S]*fix: {mine}"):
        run_overlay(project, overlay)
    # So is a drafter of an arm that the overlay takes out: the project's own.
    theirs = project / "checkpoints" / "a"
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    same = "head: make.py, states: make.py, vocab: make.py"
    overlay.write_text(f"arms: {{a: null, b: {{init: checkpoints/a, {same}}}}}\n")
    assert run_overlay(project, overlay) == 0
    assert ran(project) == ["b"]


def test_one_of_a_name_at_a_time(project: Path) -> None:
    """The second one leaves the first one's settings alone."""
    overlay = project.parent / "faster.yaml"
    assert run_overlay(project, overlay, targets=["extract"]) == 0
    folder = project / ".work" / "overlays" / "faster"
    before = (folder / "params.yaml").read_text()
    overlay.write_text("train: {lr: 0.25}\n")
    with locked(folder.with_name("faster.lock")):
        with pytest.raises(HarnessError, match=r"running already[\s\S]*faster.yaml"):
            run_overlay(project, overlay)
        assert (folder / "params.yaml").read_text() == before
    assert run_overlay(project, overlay, targets=["extract"]) == 0
    assert "0.25" in (folder / "params.yaml").read_text()
    assert not folder.with_name("faster.lock").exists()


def test_an_overlay_without_a_name(project: Path) -> None:
    nameless = project.parent / "..yaml"
    nameless.write_text("{}")
    with pytest.raises(HarnessError, match=r"has no name[\s\S]*rename"):
        prepare(project, nameless)


def test_a_verifier_that_does_not_fit_is_named_before_anything_runs(
    tiny_verifier: Path, tmp_path: Path, project_root: Path
) -> None:
    params = read_params(project_root / "params.yaml")
    params["verifier"] = {"source": str(tiny_verifier)}
    params["vocab"] = params["sibling_vocab"] = {"size": 128}
    with pytest.raises(HarnessError, match=r"too shallow[\s\S]*my.yaml, extract.aux_layers"):
        check_sources(params, tmp_path, "my.yaml")
    params["extract"] = {"aux_layers": [0, 2, 5]}
    with pytest.raises(HarnessError, match=r"no such layer[\s\S]*\[0, 2, 5\]"):
        check_sources(params, tmp_path, "my.yaml")
    params["extract"] = {"aux_layers": [0, 2, 3]}
    check_sources(params, tmp_path, "my.yaml")
    params["verifier"] = {"source": str(tmp_path / "gone")}
    with pytest.raises(HarnessError, match=r"correct verifier.source"):
        check_sources(params, tmp_path, "my.yaml")


def test_what_was_read_may_be_gone(tmp_path: Path) -> None:
    """Results that came from another machine stand without what they were made from."""
    prompts = {"source": "gone.jsonl", "test": [{"name": "a", "path": "gone/too"}]}
    stage = {"cmd": "python -m stages.prompts", "params": {"params.yaml": {"prompts": prompts}}}
    (tmp_path / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"prompts": stage}}))
    check_sources({"prompts": prompts}, tmp_path, "params.yaml")
    with pytest.raises(HarnessError, match=r"prompts.source[\s\S]*got: other.jsonl"):
        check_sources({"prompts": {"source": "other.jsonl"}}, tmp_path, "params.yaml")
    check_sources({"prompts": {"source": "owner/name"}}, tmp_path, "params.yaml")  # a data set


def test_the_default_settings_are_right(project_root: Path) -> None:
    params = read_params(project_root / "params.yaml")
    check_settings(params, "params.yaml")
    check_inputs(params, Graph(project_root, params["arms"]), "params.yaml")
    check_sources(params, project_root, "params.yaml")


@pytest.mark.parametrize("name", ["kimi_k25", "smollm2_full"])
def test_the_settings_in_experiments_fit_todays_defaults(project_root: Path, name: str) -> None:
    path = project_root / "experiments" / f"{name}.yaml"
    params = overlaid(read_params(project_root / "params.yaml"), read_yaml(path), where=path)
    check_settings(params, str(path))


def test_an_arm_that_nobody_compares(project_root: Path) -> None:
    """It would be found out by compare, after hours."""
    params = read_params(project_root / "params.yaml")
    params["arms"]["mine"] = {**params["arms"]["finetune"], "init": "checkpoints/base"}
    graph = Graph(project_root, params["arms"])
    assert graph.uncompared == ["mine"]
    check_inputs(params, graph, "params.yaml")
    params["compare"]["arms"] = ["finetune", "mine"]
    expected = r"compare.arms[\s\S]*scratch, finetune[\s\S]*got: mine[\s\S]*metrics/mine.jsonl"
    with pytest.raises(HarnessError, match=expected):
        check_inputs(params, graph, "params.yaml")


def test_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(HarnessError, match="git work tree"):
        project_files(tmp_path)
