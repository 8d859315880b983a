"""dvc.yaml against the code: deps are the real imports, outs are each stage's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stages.closure import FIRST_PARTY, WITHOUT_EFFECT, code_of
from stages.params import read_params

if TYPE_CHECKING:
    from dvc.stage import PipelineStage

OUTPUT_FOLDERS = ("data", "checkpoints", "metrics", "provenance", "report")
# What differs from run to run (seconds, speeds, run ids) may reach these stages only.
READ_TIMINGS = {"compare", "report"}


@pytest.fixture(scope="module")
def stages(project_root: Path) -> list[PipelineStage]:
    from dvc.repo import Repo

    with Repo(str(project_root)) as repo:
        return list(repo.index.stages)


def module_of(stage: PipelineStage) -> str:
    found = re.match(r"python -m (stages\.\w+) ", stage.cmd)
    assert found, f"{stage.addressing}: {stage.cmd}"
    return found[1]


def paths(things: list) -> set[str]:  # type: ignore[type-arg]
    return {thing.def_path for thing in things}


def test_code_deps_are_the_imports(stages: list[PipelineStage], project_root: Path) -> None:
    """Neither a stale result (a file missing here) nor a needless rerun (one too many)."""
    wrong = []
    for stage in stages:
        declared = {path for path in paths(stage.deps) if path.split("/")[0] in FIRST_PARTY}
        wanted = {path.as_posix() for path in code_of(project_root, module_of(stage))}
        wrong += [f"{stage.addressing} lacks {path}" for path in sorted(wanted - declared)]
        wrong += [f"{stage.addressing} does not use {path}" for path in sorted(declared - wanted)]
    assert wrong == [], "\n".join([*wrong, "`python -m stages.closure NAME` prints the list"])


def test_exclusions_exist(project_root: Path) -> None:
    assert [path for path in WITHOUT_EFFECT if not (project_root / path).is_file()] == []


def test_every_stage_depends_on_how_it_runs(stages: list[PipelineStage]) -> None:
    from dvc.dependency import ParamsDependency

    for stage in stages:
        params = [dep for dep in stage.deps if isinstance(dep, ParamsDependency)]
        assert "run" in {name for dep in params for name in dep.params}, stage.addressing


def test_outs_are_a_stages_own(stages: list[PipelineStage]) -> None:
    for stage in stages:
        for path in paths(stage.outs):
            parts = Path(path).parts
            assert parts[0] in OUTPUT_FOLDERS and len(parts) > 1, path
    every = sorted(Path(path) for stage in stages for path in paths(stage.outs))
    assert len(every) == len(set(every))
    for inner in every:  # DVC deletes what else lies in an out that is a folder
        assert [outer for outer in every if outer in inner.parents] == []


def test_command_lines_name_their_files(stages: list[PipelineStage], project_root: Path) -> None:
    """What a stage reads or writes is said in its command or its settings, and declared."""
    arms = read_params(project_root / "params.yaml")["arms"]
    for stage in stages:
        arm = arms[stage.name.partition("@")[2]] if module_of(stage) == "stages.train" else {}
        words = {*stage.cmd.split(), *(str(value) for value in arm.values())}
        named = {word for word in words if word.split("/")[0] in OUTPUT_FOLDERS and "/" in word}
        declared = {path for path in paths(stage.outs) if not path.startswith("provenance/")}
        declared |= {p for p in paths(stage.deps) if p.split("/")[0] in OUTPUT_FOLDERS}

        def within(inner: str, outer: str) -> bool:
            return inner == outer or inner.startswith(f"{outer}/")

        for word in named:  # a folder named for several files in it stands for them
            assert any(within(path, word) or within(word, path) for path in declared), (
                f"{stage.addressing}: {word} is neither a dep nor an out"
            )
        for path in declared:
            assert any(within(path, word) for word in named), (
                f"{stage.addressing}: {path} is in neither its command nor its settings"
            )


def test_what_is_not_repeatable_reaches_the_report_only(stages: list[PipelineStage]) -> None:
    for stage in stages:
        if module_of(stage).removeprefix("stages.") in READ_TIMINGS:
            continue
        read = [p for p in paths(stage.deps) if p.startswith("provenance/") or ".timing." in p]
        assert read == [], stage.addressing


def test_provenance_of_every_stage(stages: list[PipelineStage]) -> None:
    for stage in stages:
        assert f"provenance/{stage.name}.json" in paths(stage.outs), stage.addressing
        item = "" if "@" not in stage.name else f"--name {stage.name}"
        assert item in stage.cmd, stage.addressing
