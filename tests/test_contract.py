"""The capture contract on folders: stage and command, right states and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from stages import parity
from stages.params import dump_yaml
from stages.runner import run_stage
from tests.faulty import AUX, Lab


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


Command = Callable[..., tuple[int, str]]


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


def test_states_in_fp8(lab: Lab, tmp_path: Path) -> None:
    """What the codec rounded away is no fault; a layer beside the right one still is."""
    settings = ParitySettings(engine="transformers", documents=6, max_tokens=64, dtype="bfloat16")
    write(lab, tmp_path / "right", lab.documents(), codec="fp8")
    write(lab, tmp_path / "higher", lab.documents(aux=[k + 1 for k in AUX]), codec="fp8")
    write(lab, tmp_path / "shifted", lab.documents(shift=1), codec="fp8")
    with open_engine("transformers", lab.spec, settings, "cpu", longest=80) as engine:
        found = check_splits(tmp_path / "right", lab.head, settings, engine)[""]["engine"]
        assert 0.01 < found["largest_error"] < 0.035
        for folder, text in (("higher", "one too high"), ("shifted", "token t [+] 1")):
            with pytest.raises(HarnessError, match=text):
                check_splits(tmp_path / folder, lab.head, settings, engine)
    assert check_splits(tmp_path / "right", lab.head, settings, None)[""]["engine"] is None


def test_without_an_engine(lab: Lab, right: Path) -> None:
    found = check_splits(right / "dev", lab.head, ParitySettings(), None)
    assert found[""]["engine"] is None
    assert found[""]["words"].startswith("not checked against a server")
    assert json.loads(json.dumps(found)) == found


def test_no_states(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"no hidden states[\s\S]*eagle3 import"):
        splits(tmp_path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run_parity(here: Path, folder: Path, lab: Lab, **settings: Any) -> None:
    """Runs the stage."""
    params = {"run": {"threads": 1, "seed": 0, "device": "cpu"}, "parity": settings}
    (here / "params.yaml").write_text(dump_yaml(params))
    arguments = [
        *("--states", str(folder), "--verifiers", str(lab.folder)),
        *("--heads", str(lab.head_path), "--out", "metrics/parity.json"),
    ]
    run_stage("parity", parity.main, parity.add_arguments, arguments)


def test_stage_stops_the_pipeline(
    lab: Lab, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "states"
    write(lab, folder / "train", lab.documents(aux=(1, 4, 5), norms=0))
    with pytest.raises(SystemExit) as ended:
        run_parity(here, folder, lab, engine="transformers", documents=3)
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "aux[1] is the output of layer 4; serving will use layer 3" in said
    assert "final is pre-norm, declared post-norm" in said
    assert {path.name for path in here.iterdir()} == {"params.yaml"}


def test_stage_without_a_server(lab: Lab, right: Path, here: Path) -> None:
    run_parity(here, right, lab)
    verdict = json.loads((here / "metrics" / "parity.json").read_text())
    assert verdict["words"] == "not checked against a server" and verdict["engine"] is None
    data = ReportData(parity=verdict)
    assert not checked_against_server(data)
    section = contract(data)
    assert section is not None and "Not checked against a server." in section.body
    assert section.body.count("<tr>") == 3  # head, dev, train


@pytest.fixture
def command(lab: Lab, here: Path, eagle3_says: Command) -> Command:
    """Calls `eagle3 parity` on a folder; its exit code, and what it says."""

    def call(folder: Path, *more: str) -> tuple[int, str]:
        flags = ["--data-dir", str(folder), "--verifier-path", str(lab.folder), *more]
        return eagle3_says("parity", *flags)

    return call


def test_command(right: Path, command: Command) -> None:
    code, said = command(right / "train", "--engine", "transformers", "--documents", "2")
    assert code == 0 and "aux[1]" in said and "the output of layer 3" in said
    code, said = command(right, "--engine", "another")
    assert code == 2 and "transformers" in said


def test_command_names_faults(lab: Lab, tmp_path: Path, command: Command) -> None:
    write(lab, tmp_path / "states", lab.documents(shift=1))
    code, said = command(tmp_path / "states", "--engine", "transformers")
    assert code == 2 and "row t holds the state of token t + 1 in 6 of 6 documents" in said


def test_states_of_another_verifier_are_refused(lab: Lab, tmp_path: Path, command: Command) -> None:
    """One of the same sizes and configuration: a rounded copy, say."""
    folder = tmp_path / "states"
    write(lab, folder / "dev", lab.documents(), verifier="a sibling")
    code, said = command(folder)
    assert code == 2 and "made by another verifier" in said
    assert "states of a sibling" in said and "--verifier-path" in said
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
