"""The capture contract on folders: stage and command, right states and wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.contract import ParitySettings, check_splits, open_engine, splits
from eagle3.dataset import Document, StatesMeta
from eagle3.errors import HarnessError
from eagle3.report.contract import checked_against_server, contract
from eagle3.report.data import ReportData
from eagle3.shard_writer import ShardWriter
from experiments.same_verifier import check_same_verifier
from stages.params import dump_yaml
from tests.faulty import AUX, Lab, make_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def write(lab: Lab, folder: Path, documents: list[Document], **meta: Any) -> Path:
    """Documents whose tokens are the verifier's own argmax, as a finished folder."""
    values: dict[str, Any] = {
        "verifier": lab.spec.verifier,
        "config_hash": lab.spec.config_hash,
        "engine": "transformers",
        "engine_version": "5.0",
        "aux_layers": list(AUX),
        "final_hidden": "post_norm",
        "dtype": "bfloat16",
        "hidden_size": lab.spec.hidden_size,
        "vocab_size": lab.spec.vocab_size,
    }
    writer = ShardWriter(folder, StatesMeta(**{**values, **meta}))
    for document in documents:
        writer.add(document)
    writer.finish()
    return folder


@pytest.fixture(scope="module")
def right(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    for name in ("train", "dev", "test"):
        write(lab, folder / name, lab.documents())
    return folder


def test_right_states_pass(lab: Lab, right: Path) -> None:
    settings = ParitySettings(engine="transformers", documents=3, max_tokens=32, dtype="float32")
    with open_engine("transformers", lab.spec, settings, "cpu", longest=64) as engine:
        found = check_splits(right, lab.head, settings, engine, names=("train", "dev"))
    assert list(found) == ["dev", "train"]
    compared = found["train"]["engine"]
    assert [state["found"] for state in compared["states"]] == [
        "the output of layer 1", "the output of layer 3", "the output of layer 5",
        "the output of layer 7 after the last norm",
    ]  # fmt: skip
    assert 0 < compared["largest_error"] < 0.02 and compared["documents"] == 3
    assert found["train"]["words"].startswith("not checked against a server; equal to transformers")
    assert found["train"]["words"].endswith("which made them")


def test_without_an_engine(lab: Lab, right: Path) -> None:
    found = check_splits(right / "dev", lab.head, ParitySettings(), None)
    assert found[""]["engine"] is None
    assert found[""]["words"].startswith("not checked against a server")
    assert json.loads(json.dumps(found)) == found


def test_no_states(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no hidden states"):
        splits(tmp_path)


def project(root: Path, folder: Path, lab: Lab, **parity: Any) -> list[str]:
    """A folder that the stage runs in, and its command."""
    root.mkdir(exist_ok=True)
    params = {"run": {"threads": 1, "seed": 0, "device": "cpu"}, "parity": parity}
    (root / "params.yaml").write_text(dump_yaml(params))
    return [
        *(sys.executable, "-m", "stages.parity", "--states", str(folder)),
        *("--verifiers", str(lab.folder), "--heads", str(lab.head_path)),
        *("--out", "metrics/parity.json"),
    ]


def run(command: list[str], root: Path, code: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(code), "COLUMNS": "100"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_stage_stops_the_pipeline(lab: Lab, tmp_path: Path, project_root: Path) -> None:
    folder = tmp_path / "states"
    wrong = [replace(d, aux=d.aux) for d in lab.documents(aux=(1, 4, 5), norms=0)]
    write(lab, folder / "train", wrong)
    command = project(tmp_path / "root", folder, lab, engine="transformers", documents=3)
    done = run(command, tmp_path / "root", project_root)
    assert done.returncode == 2, done.stderr
    assert "aux[1] is the output of layer 4; serving will use layer 3" in done.stderr
    assert "final is pre-norm, declared post-norm" in done.stderr
    assert not (tmp_path / "root" / "metrics").exists()
    assert not (tmp_path / "root" / "provenance").exists()


def test_stage_without_a_server(lab: Lab, right: Path, tmp_path: Path, project_root: Path) -> None:
    done = run(project(tmp_path / "root", right, lab), tmp_path / "root", project_root)
    assert done.returncode == 0, done.stderr
    verdict = json.loads((tmp_path / "root" / "metrics" / "parity.json").read_text())
    assert verdict["words"] == "not checked against a server" and verdict["engine"] is None
    data = ReportData(parity=verdict)
    assert not checked_against_server(data)
    section = contract(data)
    assert section is not None and "Not checked against a server." in section.body
    assert section.body.count("<tr>") == 3  # head, dev, train


def command_line(lab: Lab, folder: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-c", "from experiments.cli import main; main()", "parity"),
        *("--data-dir", str(folder), "--verifier-path", str(lab.folder), *more),
    ]


def test_command(lab: Lab, right: Path, tmp_path: Path, project_root: Path) -> None:
    done = run(
        command_line(lab, right / "train", "--engine", "transformers", "--documents", "2"),
        tmp_path, project_root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "aux[1]" in done.stdout and "the output of layer 3" in done.stdout
    done = run(command_line(lab, right, "--engine", "another"), tmp_path, project_root)
    assert done.returncode == 2 and "transformers" in done.stderr


def test_command_names_faults(lab: Lab, tmp_path: Path, project_root: Path) -> None:
    write(lab, tmp_path / "states", lab.documents(shift=1))
    done = run(
        command_line(lab, tmp_path / "states", "--engine", "transformers"), tmp_path, project_root
    )
    assert done.returncode == 2
    assert "row t holds the state of token t + 1 in 6 of 6 documents" in done.stderr


def test_states_of_another_verifier_are_refused(
    lab: Lab, tmp_path: Path, project_root: Path
) -> None:
    """One of the same sizes and configuration: a rounded copy, say."""
    folder = tmp_path / "states"
    write(lab, folder / "dev", lab.documents(), verifier="a sibling")
    done = run(command_line(lab, folder), tmp_path, project_root)
    assert done.returncode == 2 and "made by another verifier" in done.stderr
    assert "states of a sibling" in done.stderr and "--verifier-path" in done.stderr
    dataset = splits(folder)["dev"]
    with pytest.raises(HarnessError, match=r"another verifier[\s\S]*states of a sibling"):
        check_same_verifier(dataset, lab.head.config, lab.spec.revision)
    # Where weights are known on both sides, they decide.
    for revision, name in ((lab.spec.revision, "moved here"), ("0" * 16, lab.spec.verifier)):
        write(lab, tmp_path / revision, lab.documents(), verifier=name, revision=revision)
        dataset = splits(tmp_path / revision)[""]
        if revision == lab.spec.revision:
            check_same_verifier(dataset, lab.head.config, revision)
        else:
            with pytest.raises(HarnessError, match="revision 0000"):
                check_same_verifier(dataset, lab.head.config, lab.spec.revision)
            check_same_verifier(dataset, lab.head.config)  # a head alone does not tell
