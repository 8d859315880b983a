"""A tiny project for studies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.study import tracking
from tests.tiny_study import make_project, use_store


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """A study's run is in the store at once, since its trainings wait for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "FLUSH_SECONDS", 0.05)
        yield


@pytest.fixture(scope="session")
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
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder
