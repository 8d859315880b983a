"""The benchmark of codecs on a tiny project: bytes by hand, errors of rounding, paired seeds."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.benchmarks import codec
from experiments.evidence import KEY
from experiments.study.training import train_once
from tests.settings_of import change
from tests.tiny_study import make_project


@pytest.fixture(scope="module")
def project(
    tiny_verifier: Path, project_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_project(tmp_path_factory.mktemp("codecs"), tiny_verifier, project_root)


def run(project: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.chdir(project)
    return codec.main(["--tokens", "1500", *more])


def test_what_a_codec_saves_and_costs(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = []

    def watched(*args: Any, **named: Any) -> Any:
        drafter, rest = train_once(*args, **named)
        weights.append(drafter.fc.weight.detach().clone())
        return drafter, rest

    monkeypatch.setattr(codec, "train_once", watched)
    assert run(project, monkeypatch) == 0
    found = json.loads((project / "reports" / "codecs.json").read_text())
    assert json.loads(capsys.readouterr().out) == {k: v for k, v in found.items() if k != KEY}
    plain, eight = found["codecs"]
    # Four states of 64 numbers, a scale each in 8 bits, and what else a row has: 13 bytes.
    wanted = {"none": 4 * 64 * 2 + 13, "fp8": 4 * (64 + 4) + 13}
    for row in (plain, eight):
        header = row["bytes_per_row"] - wanted[row["codec"]]
        assert 0 < header < 3, row  # of one small shard
    assert "errors" not in plain and "difference" not in plain
    assert [one["state"] for one in eight["errors"]] == ["layer 0", "layer 2", "layer 3", "final"]
    for one in eight["errors"]:
        assert 0.015 < one["mean"] < one["largest"] < 0.04
    pairs = zip(plain["tau_by_seed"], eight["tau_by_seed"], strict=True)
    differences = [two - one for one, two in pairs]
    assert eight["difference"]["by_seed"] == pytest.approx(differences) and len(differences) == 2
    assert eight["difference"]["value"] == pytest.approx(sum(differences) / 2)
    assert eight["difference"]["low"] <= eight["difference"]["value"]
    assert all(1.05 < tau <= 3.0 for tau in plain["tau_by_seed"])  # it learnt
    # Of two seeds on each: other states make other drafters, and so do other seeds.
    assert len(weights) == 4
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(weights, 2))
    assert (found["arm"], found["tokens"], found["seeds"], found["prompts"]) == (
        "scratch", 1500, 2, 8,
    )  # fmt: skip
    record = found[KEY]
    assert record["settings"]["arguments"]["states"] == "data/hidden_states"
    assert record["settings"]["arguments"]["train"]["lr"] == 5.0e-3
    assert {"eagle3/codec.py", "eagle3/trainer.py"} <= record["code"].keys()
    assert [path.name for path in (project / ".work").iterdir()] == []


def test_equal_states_would_give_equal_drafters(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is the codec's alone: the same states again make none."""

    def copied(*, data_dir: Path, output_dir: Path, **others: object) -> None:
        shutil.copytree(data_dir, output_dir)

    monkeypatch.setattr(codec, "write_again", copied)
    assert run(project, monkeypatch, "--out", "same.json") == 0
    plain, same = json.loads((project / "same.json").read_text())["codecs"]
    assert plain["tau_by_seed"] == same["tau_by_seed"]
    assert same["difference"]["by_seed"] == [0.0, 0.0]
    assert {one["largest"] for one in same["errors"]} == {0.0}


def test_what_cannot_be_measured(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, monkeypatch, "--seeds", "1") == 2
    assert "--seeds" in capsys.readouterr().err
    assert run(project, monkeypatch, "--arm", "mine") == 2
    assert "mine" in capsys.readouterr().err
    data = project / "data"
    codec.write_again(
        verifier_path=str(data / "verifier_head.safetensors"), data_dir=data / "hidden_states",
        output_dir=data / "eight", val_ratio=0.0, conventions=codec.Conventions(), codec="fp8",
    )  # fmt: skip
    change(project, arms={"scratch": {"states": "data/eight"}})
    assert run(project, monkeypatch) == 2
    said = capsys.readouterr().err
    assert "nothing to compare a codec with" in said and "codec fp8" in said
    assert not (project / "mlflow.db").exists()
