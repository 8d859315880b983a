"""`eagle3 train` from flags to checkpoint, on states made by hand."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.dataset import StatesMeta
from eagle3.errors import HarnessError
from eagle3.shard_writer import ShardWriter
from experiments import lineage_command
from experiments.train_command import run
from tests.settings_of import write_settings
from tests.tiny_head import make_head
from tests.tiny_training import HIDDEN, VOCAB, make_documents


@pytest.fixture
def project(
    tmp_path: Path, project_root: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A project folder with states and a verifier head in it; the current folder."""
    changes = {
        "run": {"threads": 1},
        "train": {"batch_tokens": 64, "evaluations": 2},
        "vocab": {"size": 20},
    }
    write_settings(tmp_path, project_root, changes)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    head = make_head(vocab=VOCAB)
    tensors = {"embed": head.embed, "norm": head.norm, "lm_head": head.lm_head}
    assert head.layer is not None
    tensors |= {f"layer.{name}": weight for name, weight in head.layer.items()}
    save_file(tensors, tmp_path / "head.safetensors", {"config": head.config.model_dump_json()})
    meta = StatesMeta(
        verifier="tiny",
        config_hash=head.config.config_hash,
        engine="made",
        engine_version="1",
        aux_layers=[0, 2, 3],
        final_hidden="post_norm",
        dtype="bfloat16",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
    )
    writer = ShardWriter(tmp_path / "states", meta)
    for document in make_documents(30):
        writer.add(document)
    writer.finish()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(**flags: Any) -> None:
    paths: dict[str, Any] = {"verifier_path": "head.safetensors", "data_dir": Path("states")}
    run(**(paths | {"output_dir": Path("drafter")} | flags))


def test_from_scratch_then_finetune(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(epochs=2, lr=1e-3, ttt_steps=2, noise_std=0.05, val_ratio=0.2, scheduler="linear")
    assert caplog.messages[0] == "from scratch: no --finetune-from"
    about = json.loads((project / "drafter" / "provenance.json").read_text())
    assert about["settings"]["lr"] == 1e-3
    assert about["settings"]["noise"] == {"kind": "uniform_abs", "std": 0.05}
    assert about["settings"]["objective"]["ttt_steps"] == 2
    assert about["best_dev_tau"] >= 1.0
    first = load_file(project / "drafter" / "model.safetensors")
    assert len(first["d2t"]) == 20
    caplog.clear()
    train(epochs=1, finetune_from="drafter", output_dir=Path("second"), lr=1e-9)
    assert caplog.messages[0] == "finetune from drafter"
    second = load_file(project / "second" / "model.safetensors")
    # At a rate of nearly nothing it is still the drafter that it started from.
    torch.testing.assert_close(second["fc.weight"], first["fc.weight"], atol=1e-5, rtol=0)


def test_a_budget_in_tokens(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tokens=100)
    about = json.loads((project / "drafter" / "provenance.json").read_text())
    assert about["tokens"] == 100
    # Batches of 64 packed rows.
    assert about["best_step"] <= 2
    with pytest.raises(HarnessError, match=r"two budgets[\s\S]*100 tokens and 2 epochs"):
        train(tokens=100, epochs=2, output_dir=Path("none"))
    assert not Path("none").exists()


LOCK = """
stages:
  extract:
    cmd: python -m stages.extract --name extract
    outs:
    - {path: states, md5: aaaa.dir}
"""


def test_its_origin_leads_back_to_the_stages(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By folder, by the file in it and by the MLflow run; what no stage made is named as such."""
    (project / "dvc.lock").write_text(LOCK)
    train(tokens=100, lr=5e-4, data_dir=project / "states")
    record = json.loads((project / "drafter" / "provenance.json").read_text())
    assert record["inputs"]["states"] == "aaaa.dir"
    assert not any("index.jsonl" in path for path in record["inputs"])
    assert "eagle3/ttt.py" in record["code"] and record["torch"]["version"]
    [run_of] = record["mlflow_runs"]
    for asked in ("drafter", "drafter/provenance.json", run_of["run_id"]):
        capsys.readouterr()
        lineage_command.run(project, asked, None, as_json=False)
        text = capsys.readouterr().out
        assert "\ntrain drafter   code " in text and "its record is not here" not in text[:200]
        assert "\n  from    states  aaaa.dir  extract\n" in text
        assert "not made by a stage" in text  # the verifier's head
        assert f"\n  MLflow  {run_of['run_id']}  train drafter\n" in text
        assert "\nextract   code " in text
        assert "lr: 0.0005\n" in text and "tokens: 100\n" in text
    assert "made    drafter/model.safetensors" not in text  # MLflow's run does not say
    with pytest.raises(HarnessError, match="nothing here has this origin"):
        lineage_command.run(project, ".", None, as_json=False)


def test_a_given_vocabulary_is_the_drafters(project: Path) -> None:
    targets = np.array([0, 1, 5, 11, 30])
    kept = np.zeros(VOCAB, dtype=bool)
    kept[targets] = True
    (project / "mapping").mkdir()
    np.save(project / "mapping" / "t2d.npy", kept)
    np.save(project / "mapping" / "d2t.npy", targets)
    train(epochs=1, vocab_mapping_dir=Path("mapping"))
    tensors = load_file(project / "drafter" / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(5)).tolist() == targets.tolist()
    assert tensors["lm_head.weight"].shape == (5, HIDDEN)


def test_a_mapping_that_cannot_end_an_answer_is_said(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = np.zeros(VOCAB, dtype=bool)
    kept[[5, 11, 30]] = True
    (project / "mapping").mkdir()
    np.save(project / "mapping" / "t2d.npy", kept)
    np.save(project / "mapping" / "d2t.npy", np.array([5, 11, 30]))
    train(epochs=1, vocab_mapping_dir=Path("mapping"))
    assert any("cannot draft token [" in message for message in caplog.messages)


def test_samples_cut_before_their_answer_are_counted(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """make_documents' answers begin at token 3: a row that is fed needs two after it."""
    train(epochs=1, max_seq_len=5)
    assert not any("nothing is learnt" in message for message in caplog.messages)
    with pytest.raises(HarnessError, match=r"nothing to learn[\s\S]*first 4\n[\s\S]*30 samples"):
        train(epochs=1, max_seq_len=4, output_dir=Path("none"))
    assert not Path("none").exists()


def test_a_drafter_is_refused_before_samples_are_read(project: Path) -> None:
    train(epochs=1)
    path = project / "drafter" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"fc.weight": tensors["fc.weight"] * torch.nan}, path)
    with pytest.raises(HarnessError, match=r"weights hold a NaN[\s\S]*got: fc.weight"):
        train(epochs=1, finetune_from="drafter", output_dir=Path("second"))
    save_file(tensors, path)
    config = json.loads((project / "drafter" / "config.json").read_text())
    config["aux_layers"] = [0, 1, 3]
    (project / "drafter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(HarnessError, match=r"other layers[\s\S]*\[0, 2, 3\][\s\S]*\[0, 1, 3\]"):
        train(epochs=1, finetune_from="drafter", output_dir=Path("second"))
    assert not Path("second").exists()
    runs = list(Path(".work/tracking").glob("*/journal.jsonl"))
    assert len(runs) <= 1  # of the first training: a refusal is no run
