"""dvc.yaml against the code: deps are the real imports, outs are each stage's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stages.closure import WITHOUT_EFFECT, code_of

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
        declared = {path for path in paths(stage.deps) if path.endswith(".py")}
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


def test_command_lines_name_their_files(stages: list[PipelineStage]) -> None:
    """An artefact that a stage reads or writes is said in its command, so it is a dep or an out."""
    for stage in stages:
        named = {
            word
            for word in stage.cmd.split()
            if word.split("/")[0] in OUTPUT_FOLDERS and "/" in word
        }
        declared = paths(stage.outs) | {
            path for path in paths(stage.deps) if path.split("/")[0] in OUTPUT_FOLDERS
        }
        # A folder named for several files in it stands for them.
        for word in named:
            assert any(
                path == word or path.startswith(f"{word}/") or word.startswith(f"{path}/")
                for path in declared
            ), f"{stage.addressing}: {word} is neither a dep nor an out"
        for path in declared - {f"provenance/{stage.name}.json"}:
            assert any(path == word or path.startswith(f"{word}/") for word in named), (
                f"{stage.addressing}: {path} is not in its command line"
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
