"""Publishing: in one step, on one file system or across two."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.workspace import publish


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


def test_a_folder_replaces_a_folder(tmp_path: Path) -> None:
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    publish(tmp_path / "new", tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_across_file_systems(tmp_path: Path, elsewhere: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
        (tmp_path / f"{name}.txt").write_text(name)
        publish(tmp_path / name, elsewhere / "out")
        publish(tmp_path / f"{name}.txt", elsewhere / "out.txt")
        assert (elsewhere / "out" / "text").read_text() == name
        assert (elsewhere / "out.txt").read_text() == name
        assert {path.name for path in elsewhere.iterdir()} == {"out", "out.txt"}
