"""Publishing in one step, on one file system or across two; a working folder for one process."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from eagle3 import workspace
from eagle3.errors import HarnessError
from eagle3.workspace import UNFINISHED, publish, work_folder, write_json


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_replaces_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:  # a file system that cannot
        monkeypatch.setattr(workspace, "_exchange", lambda one, other: False)
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


def test_two_folders_change_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    if not workspace._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "a" / "text").read_text() == "b"
    assert (tmp_path / "b" / "text").read_text() == "a"
    assert not workspace._exchange(tmp_path / "a", tmp_path / "missing")


def test_what_was_just_being_written_stays_behind(tmp_path: Path) -> None:
    """A kill between a file's bytes and its name: the folder that is published later holds what
    one without a kill holds."""
    source = tmp_path / "new" / "train"
    write_json(source / "meta.json", {"a": 1})
    with tempfile.NamedTemporaryFile(
        dir=source, prefix=".meta.json.", suffix=UNFINISHED, delete=False
    ):
        pass
    (source / ".keep").write_text("mine")
    publish(tmp_path / "new", tmp_path / "out")
    found = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    assert found == [".keep", "meta.json", "train"]


def test_a_working_folder_is_for_one_process(tmp_path: Path) -> None:
    with work_folder(tmp_path, "train", {"a": 1}) as folder:
        (folder / "kept").touch()
        with (
            pytest.raises(HarnessError, match="running already"),
            work_folder(tmp_path, "train", {"a": 1}),
        ):
            pass
        assert (folder / "kept").exists()
        with work_folder(tmp_path, "train", {"a": 2}) as other:
            assert other != folder
    assert list((tmp_path / ".work").iterdir()) == []


def test_one_process_at_a_time_works_for_an_output(tmp_path: Path) -> None:
    """Whatever the settings: the second would replace what the first has just made."""
    out = tmp_path / "drafter"
    with pytest.raises(OSError), work_folder(tmp_path, "train", {"lr": 1}, output=out) as folder:
        (folder / "kept").touch()
        with (
            pytest.raises(HarnessError, match=rf"running already\n  where: {out}"),
            work_folder(tmp_path, "train", {"lr": 2}, output=out),
        ):
            pass
        with work_folder(tmp_path, "train", {"lr": 2}, output=tmp_path / "other"):
            pass
        raise OSError("killed")
    with work_folder(tmp_path, "train", {"lr": 2}, output=out) as other:
        assert other != folder
    with work_folder(tmp_path, "train", {"lr": 1}, output=out) as again:
        assert (again / "kept").exists()
    assert list((tmp_path / ".work").iterdir()) == []


@pytest.mark.parametrize("held", [True, False])
def test_a_lock_deleted_before_it_is_ours_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """The last holder deletes the file that we have opened; another process makes a new one."""
    real = fcntl.flock
    others: list[IO[str]] = []

    def flock(file: IO[str], kind: int) -> None:
        real(file, kind)
        if not others:
            Path(file.name).unlink()
            others.append(Path(file.name).open("w"))  # noqa: SIM115
            if held:
                real(others[0], fcntl.LOCK_EX)

    monkeypatch.setattr(workspace.fcntl, "flock", flock)
    if held:
        with pytest.raises(HarnessError, match="running already"), work_folder(tmp_path, "s", {}):
            pass
    else:
        with work_folder(tmp_path, "s", {}), pytest.raises(BlockingIOError):
            real(others[0], fcntl.LOCK_EX | fcntl.LOCK_NB)  # the file that stands there is ours
    others[0].close()
