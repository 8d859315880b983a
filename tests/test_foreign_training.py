"""Training on another program's hidden states where they lie, and on what was imported of them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.conventions import Conventions
from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from experiments import import_command, train_command
from experiments.conventions_flags import conventions, layers
from tests.foreign_data import LAYERS, make_samples, write_arrow, write_specforge, write_v1
from tests.settings_of import write_settings

SAID = Conventions(aux_layers=LAYERS)


@pytest.fixture
def project(
    tmp_path: Path, project_root: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A project folder with a verifier and two foreign folders in it; the current folder."""
    changes = {
        "run": {"threads": 1},
        "train": {"batch_tokens": 64, "evaluations": 1, "dtype": "float32"},
        "vocab": {"size": 200},
    }
    write_settings(tmp_path, project_root, changes)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    samples = make_samples(tmp_path / "verifier")
    write_v1(tmp_path / "v1", samples)
    write_specforge(tmp_path / "specforge", samples)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(data: str, out: str, **more: Any) -> dict[str, torch.Tensor]:
    given: dict[str, Any] = {"epochs": 2, "val_ratio": 0.3, "noise_std": 0.05, "conventions": SAID}
    given |= {"verifier_path": "verifier", "data_dir": Path(data), "output_dir": Path(out)}
    train_command.run(**(given | more))
    return load_file(Path(out) / "model.safetensors")


def test_in_place_imported_and_from_scratch_are_one(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A v1 folder trains to the same bits as the shards that were imported of it."""
    caplog.set_level(logging.INFO)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in Path("v1").iterdir())
    in_place = train("v1", "a")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in Path("v1").iterdir()) == before
    text = "\n".join(caplog.messages)
    assert caplog.messages[0] == "from scratch: no --finetune-from"
    assert "8 samples of speculators v1, read in place" in text
    assert "final states: pre_norm, found from the data (0% of" in text
    assert "loss mask: aligned to the token (8 of 8 runs" in text
    import_command.run(
        verifier_path="verifier", data_dir=Path("v1"), output_dir=Path("shards"), val_ratio=0.3,
        conventions=SAID,
    )  # fmt: skip
    sets = [StatesDataset.open(Path("shards") / name, verify=True) for name in ("train", "dev")]
    assert sorted([*sets[0].ids, *sets[1].ids]) == [f"data_{i}" for i in range(8)]
    assert sets[0].meta.final_hidden == "pre_norm" and sets[0].meta.aux_layers == LAYERS
    imported = train("shards", "b", conventions=Conventions())
    assert imported.keys() == in_place.keys()
    assert all(torch.equal(imported[name], in_place[name]) for name in in_place)
    about = [json.loads((Path(out) / "provenance.json").read_text()) for out in ("a", "b")]
    assert about[0]["best_dev_tau"] == about[1]["best_dev_tau"] >= 1.0
    assert not list(Path(".work").glob("*/head.safetensors"))


def test_training_on_fp8_states(project: Path) -> None:
    """Imported into fp8 at once or by way of the pipeline's own shards: the same bytes; a drafter
    trained on them is near the one trained on the states as they were."""
    importing: dict[str, Any] = {"verifier_path": "verifier", "val_ratio": 0.3}
    import_command.run(
        **importing, data_dir=Path("v1"), output_dir=Path("shards"), conventions=SAID
    )
    import_command.run(
        **importing, data_dir=Path("v1"), output_dir=Path("at_once"), conventions=SAID, codec="fp8"
    )
    again = {"data_dir": Path("shards"), "conventions": Conventions(), "codec": "fp8"}
    import_command.run(**importing, output_dir=Path("again"), **again)
    for name in ("train", "dev"):
        files = sorted(path.name for path in Path("shards", name).iterdir())
        for file in files:
            at_once, later = (Path(out, name, file).read_bytes() for out in ("at_once", "again"))
            assert at_once == later
        wide, narrow = (Path(out, name, files[-1]).stat().st_size for out in ("shards", "again"))
        assert narrow < 0.4 * wide  # of float32
        assert StatesDataset.open(Path("again") / name, verify=True).meta.codec == "fp8"
    plain = train("shards", "a", conventions=Conventions(), noise_std=None)
    fp8 = train("again", "b", conventions=Conventions(), noise_std=None)
    weights = [name for name, tensor in plain.items() if tensor.is_floating_point()]
    moved = [float((fp8[name] - plain[name]).norm() / plain[name].norm()) for name in weights]
    assert 0 < max(moved) < 0.3
    with pytest.raises(HarnessError, match="say themselves what they are"):
        import_command.run(**importing, output_dir=Path("c"), **(again | {"conventions": SAID}))
    with pytest.raises(HarnessError, match=r"no such codec[\s\S]*none or fp8"):
        import_command.run(**importing, output_dir=Path("c"), **(again | {"codec": "fp4"}))


def test_pre_and_post_norm_states_train_alike(project: Path) -> None:
    """speculators' states are from before the last norm, SpecForge's from after: one verifier."""
    first, second = train("v1", "a", noise_std=None), train("specforge", "b", noise_std=None)
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, atol=2e-4, rtol=1e-3)


def test_every_folder_trains_in_place_as_its_import(project: Path) -> None:
    """Later speculators' folders to the bit, and SpecForge's in gzip as those that are not."""
    samples = make_samples(Path("again"))
    write_arrow(Path("arrow"), samples)
    write_specforge(Path("packed"), samples, compress_from=3)
    in_place = train("arrow", "a")
    import_command.run(
        verifier_path="verifier", data_dir=Path("arrow"), output_dir=Path("shards"), val_ratio=0.3,
        conventions=SAID,
    )  # fmt: skip
    imported = train("shards", "b", conventions=Conventions())
    plain, packed = train("specforge", "c"), train("packed", "d")
    for one, other in ((in_place, imported), (plain, packed)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    taus = [json.loads((Path(o) / "provenance.json").read_text())["best_dev_tau"] for o in "abcd"]
    assert taus[0] == taus[1] >= 1.0 and taus[2] == taus[3] >= 1.0


def test_what_is_refused(project: Path) -> None:
    def refused(message: str, call: Any, **arguments: Any) -> None:
        with pytest.raises(HarnessError, match=message):
            call(**arguments)
        assert not Path("out").exists()
        left = [path for path in Path(".work").rglob("*") if path.suffix == ".safetensors"]
        assert left == []

    v1 = {"data": "v1", "out": "out"}
    refused(r"which layers[\s\S]*--aux-layers", train, **v1, conventions=Conventions())
    wrong = SAID.model_copy(update={"final_hidden": "post_norm"})
    refused("deny what was said of the final states", train, **v1, conventions=wrong)
    import_command.run(
        verifier_path="verifier", data_dir=Path("v1"), output_dir=Path("shards"), val_ratio=0.0,
        conventions=SAID,
    )  # fmt: skip
    refused("say themselves what they are", train, data="shards/train", out="out")
    importing = {"verifier_path": "verifier", "val_ratio": 0.0, "conventions": SAID}
    where = {"data_dir": Path("shards"), "output_dir": Path("out")}
    refused(r"no hidden states of a known format[\s\S]*got: train", import_command.run,
            **importing, **where)  # fmt: skip
    with pytest.raises(HarnessError, match=r"holds other files[\s\S]*train"):
        import_command.run(**importing, data_dir=Path("v1"), output_dir=Path("shards"))


def test_a_verifier_without_a_layer_to_start_from(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts or latent attention: no flag says how the draft layer starts, so it starts random."""
    caplog.set_level(logging.INFO)
    weights = Path("verifier/model.safetensors")
    tensors = load_file(weights)
    renamed = {n.replace("4.mlp.up_proj", "4.mlp.experts.0.up_proj"): t for n, t in tensors.items()}
    weights.unlink()  # the linked file is others'
    save_file(renamed, weights, {"format": "pt"})
    train("v1", "out", epochs=1)
    assert any("no Llama-like last layer: the draft layer" in m for m in caplog.messages)
    about = json.loads(Path("out/provenance.json").read_text())
    assert about["settings"]["drafter"]["layer_init"] == "random"


def test_a_share_that_leaves_nothing_is_refused(project: Path) -> None:
    for path in Path("v1").glob("data_[1-9].pt"):
        path.unlink()
    importing = {"verifier_path": "verifier", "val_ratio": 0.9, "conventions": SAID}
    with pytest.raises(HarnessError, match=r"left to train on[\s\S]*0.9[\s\S]*1 held out of as"):
        import_command.run(**importing, data_dir=Path("v1"), output_dir=Path("out"))
    with pytest.raises(HarnessError, match="left to train on"):
        train("v1", "out", val_ratio=0.9)
    assert not Path("out").exists()


def test_flags_as_settings() -> None:
    assert conventions("2,30,58", "post_norm", None, "drop") == Conventions(
        aux_layers=[2, 30, 58], final_hidden="post_norm", padding_rows="drop"
    )
    with pytest.raises(HarnessError, match=r"--aux-layers[\s\S]*2,30,58[\s\S]*got: 2;30"):
        layers("2;30", "--aux-layers")
    with pytest.raises(HarnessError, match=r"final_hidden = 'after'[\s\S]*'post_norm'"):
        conventions(None, "after", None, "refuse")
