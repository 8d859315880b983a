"""What changes behind its path is read again, what does not is not: a small pipeline under DVC."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.renewal import changed, repro
from stages import outside
from tests.small_pipeline import dvc, path_with_python, write_pipeline

DVC_YAML = """
stages:
  prompts:
    cmd: python make.py prompts data/prompts
    deps: [make.py]
    params: [prompts]
    outs: [data/prompts, provenance/prompts.json]
  train:
    cmd: python make.py train data/checkpoint
    deps: [make.py, data/prompts]
    outs: [data/checkpoint]
"""
MAKE = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, os.environ["CODE"])
from stages import outside
from stages.params import read_params
name, out = sys.argv[1], Path(sys.argv[2])
with Path(os.environ["RAN"]).open("a") as log:
    log.write(name + " ")
out.parent.mkdir(exist_ok=True)
if name == "train":
    out.write_text(Path("data/prompts").read_text())
else:
    values = read_params(Path("params.yaml"))["prompts"]
    out.write_text(f"{values['count']} of {Path(values['source']).read_text()}")
    Path("provenance").mkdir(exist_ok=True)
    record = {"outside": outside.digests(Path.cwd(), "prompts", values)}
    Path("provenance/prompts.json").write_text(json.dumps(record))
"""


class Small:
    """The pipeline in `root`; its prompts come from `source`, which lies outside."""

    def __init__(self, root: Path, code: Path) -> None:
        self.root, self.source, self.log = root, root.parent / "mine.jsonl", root.parent / "ran"
        config = "[core]\n    analytics = false\n    no_scm = true\n"
        write_pipeline(root, {"dvc.yaml": DVC_YAML, "make.py": MAKE, ".dvc/config": config})
        own = {"RAN": str(self.log), "CODE": str(code), "PATH": path_with_python()}
        self.environment = {**os.environ, **own}

    def count(self, number: int) -> None:
        settings = f"prompts: {{source: {self.source}, count: {number}}}\n"
        (self.root / "params.yaml").write_text(settings)

    def ran(self) -> list[str]:
        """Stages that `eagle3 repro` runs now."""
        self.log.write_text("")
        assert repro(self.root, self.environment) == 0
        return self.log.read_text().split()

    @property
    def made(self) -> str:
        return (self.root / "data" / "checkpoint").read_text()


def test_a_changed_file_runs_its_stage_again(
    tmp_path: Path, project_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = Small(tmp_path / "project", project_root)
    small.source.write_text("a")
    small.count(1)
    assert changed(small.root, "prompts") == [str(small.source)]  # nothing is known of it yet
    assert changed(small.root, "verifier") == []
    assert small.ran() == ["prompts", "train"] and small.made == "1 of a"
    small.source.touch()
    assert small.ran() == []
    small.count(2)
    assert small.ran() == ["prompts", "train"] and small.made == "2 of a"
    small.source.write_text("b")
    capfd.readouterr()
    assert small.ran() == ["prompts", "train"] and small.made == "2 of b"
    assert f"prompts runs again, since this has changed behind its path: {small.source}" in (
        capfd.readouterr().out
    )
    small.count(1)  # of which DVC's run cache has what came of a
    assert small.ran() == ["prompts", "train"] and small.made == "1 of b"
    # Plain `dvc repro` has nothing to do either.
    small.log.write_text("")
    dvc(small.root, "repro", environment=small.environment)
    assert small.log.read_text() == ""
    # Gone, as on a machine that has the results alone: they stand.
    small.source.unlink()
    assert small.ran() == []


@pytest.mark.parametrize("damaged", ["{", "[]", ""])
def test_a_damaged_record_says_nothing(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "mine.jsonl").write_text("a")
    (tmp_path / "params.yaml").write_text("prompts: {source: mine.jsonl}")
    (tmp_path / "provenance").mkdir()
    (tmp_path / "provenance" / "prompts.json").write_text(damaged)
    assert changed(tmp_path, "prompts") == ["mine.jsonl"]


def test_what_is_named_from_outside() -> None:
    values = {"source": "p.jsonl", "test": [{"path": "m.jsonl"}, {"package": {}}, {"path": None}]}
    assert list(outside.named("prompts", values)) == [
        ("source", "p.jsonl"),
        ("test[0].path", "m.jsonl"),
    ]
    assert list(outside.named("verifier", {"source": None})) == []
    assert list(outside.named("train", {"source": "x"})) == []


def test_what_is_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and content count; of a large file the size and both ends."""
    monkeypatch.setattr(outside, "WHOLE", 100)
    monkeypatch.setattr(outside, "END", 10)
    files = {"config.json": b"{}", "model.safetensors": bytes(range(200))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "inner").mkdir()

    def now() -> str:
        return outside.digests(tmp_path.parent, "verifier", {"source": tmp_path.name})[
            tmp_path.name
        ]

    first = now()
    (tmp_path / ".lock").touch()
    assert now() == first
    seen = {first}
    for name, content in (
        ("config.json", b"[]"),
        ("model.safetensors", bytes([1, *range(1, 200)])),
        ("model.safetensors", bytes([*range(199), 0])),
        ("model.safetensors", bytes(range(201))),
        ("new.json", b""),
    ):
        before = (tmp_path / name).read_bytes() if name in files else None
        (tmp_path / name).write_bytes(content)
        assert now() not in seen, name
        seen.add(now())
        if before is not None:
            (tmp_path / name).write_bytes(before)
            assert now() == first
    assert outside.digests(tmp_path, "verifier", {"source": "owner/name"}) == {}
