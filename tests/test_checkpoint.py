"""First weights, checkpoints and export: by token id, by layer convention, by value."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import load_drafter, save_drafter
from eagle3.errors import HarnessError
from eagle3.export import export, probe
from eagle3.formats.eagle import read_eagle_config
from eagle3.initialise import DrafterSettings, from_checkpoint, new_drafter
from eagle3.layer_ids import sglang_layer_ids
from tests.tiny_head import LAYERS, E, H, make_head, saved, vocabulary


def test_a_scratch_drafter_starts_as_the_verifiers_last_layer() -> None:
    head = make_head()
    drafter = new_drafter(head, vocabulary(1, 4, 9), LAYERS, DrafterSettings(), seed=0)
    assert head.layer is not None
    q = drafter.midlayer.self_attn.q_proj.weight
    assert torch.equal(q[:, H:], head.layer["self_attn.q_proj.weight"])
    assert not q[:, :H].any()
    assert torch.equal(drafter.midlayer.hidden_norm.weight, head.layer["input_layernorm.weight"])
    assert torch.equal(drafter.lm_head.weight, head.lm_head[[1, 4, 9]])
    assert drafter.target_ids(torch.tensor([0, 1, 2])).tolist() == [1, 4, 9]
    aux = torch.randn(2, 3, H)
    assert torch.equal(drafter.fuse(aux), aux[:, 2])


def test_random_weights_depend_on_the_seed_alone() -> None:
    settings = DrafterSettings(layer_init="random", fc_init="random", head="random")

    def made(seed: int) -> torch.Tensor:
        return new_drafter(make_head(), vocabulary(1, 4, 9), LAYERS, settings, seed).fc.weight

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


def test_head_rows_of_another_draft_vocabulary_move_by_token_id(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", head="random")
    old = load_file(folder / "model.safetensors")["lm_head.weight"]
    head = make_head()
    drafter = from_checkpoint(folder, head, vocabulary(4, 7, 9, 20), LAYERS)
    # 4 and 9 were rows 1 and 2; 7 and 20 were not there and start as the verifier's.
    expected = torch.stack([old[1], head.lm_head[7], old[2], head.lm_head[20]])
    assert torch.equal(drafter.lm_head.weight, expected)
    assert drafter.target_ids(torch.arange(4)).tolist() == [4, 7, 9, 20]


def test_other_layers_than_the_datas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="other layers") as caught:
        from_checkpoint(saved(tmp_path / "old"), make_head(), vocabulary(1, 4, 9), (0, 1, 3))
    assert "[0, 1, 3]" in str(caught.value) and "[0, 2, 3]" in str(caught.value)


def test_a_drafter_of_another_verifier_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old")
    with pytest.raises(HarnessError, match="another hidden size") as caught:
        load_drafter(folder, make_head(hidden=32), torch.float32)
    assert "32" in str(caught.value) and "16" in str(caught.value)
    with pytest.raises(HarnessError, match="layers that the verifier does not have"):
        load_drafter(folder, make_head(layers=3), torch.float32)


def test_unknown_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    tensors["surprise"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HarnessError) as caught:
        load_drafter(folder, make_head(), torch.float32)
    assert "missing: norm.weight" in str(caught.value) and "again, whole" in str(caught.value)
    assert "unknown: surprise" in str(caught.value)


def test_the_head_of_a_draft_vocabulary_is_not_filled_in(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HarnessError, match=r"no head[\s\S]*missing: lm_head.weight"):
        load_drafter(folder, make_head(), torch.float32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", None, "does not say which tokens it is of[\\s\\S]*3 of 30 tokens"),
        ("d2t", torch.zeros(2, dtype=torch.int64), "tensor d2t does not fit"),
        ("d2t", torch.full((3,), 1000), "beyond the verifier's"),
        ("d2t", torch.tensor([1, 3, 8]), "d2t and t2d disagree[\\s\\S]*2 of them in t2d"),
        ("lm_head.weight", torch.zeros(2, 16), "tensor lm_head.weight does not fit"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    folder = saved(tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if value is None else {name: value}), folder / "model.safetensors")
    with pytest.raises(HarnessError, match=message) as caught:
        from_checkpoint(folder, make_head(), vocabulary(1, 4, 9), LAYERS)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([1, 3, 27], "d2t and t2d disagree[\\s\\S]*2 of them in t2d"),
        ([1, 3, 1000], "beyond the verifier's[\\s\\S]*0 to 29[\\s\\S]*1 to 1002"),
        ([1, 0, 7], "d2t and t2d disagree[\\s\\S]*token 1 at draft ids 0, 1"),
    ],
)
def test_a_draft_vocabulary_that_contradicts_itself_is_not_loaded(
    tmp_path: Path, d2t: list[int], message: str
) -> None:
    folder = saved(tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": torch.tensor(d2t)}, folder / "model.safetensors")
    with pytest.raises(HarnessError, match=message) as caught:
        load_drafter(folder, make_head(), torch.float32)
    assert f"where: {folder}" in str(caught.value) and "fix: " in str(caught.value)


def test_token_ids_in_d2t_are_loaded_as_offsets(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": torch.tensor([1, 4, 9])}, folder / "model.safetensors")
    drafter = load_drafter(folder, make_head(), torch.float32)
    assert drafter.d2t.tolist() == [1, 3, 7]


@pytest.mark.parametrize("layers", [5, [], ["2"]])
def test_aux_layers_are_a_list_of_numbers(tmp_path: Path, layers: object) -> None:
    path = saved(tmp_path / "old") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"aux_layers": layers}))
    with pytest.raises(HarnessError, match=r"config.json, aux_layers[\s\S]*whole numbers"):
        load_drafter(path.parent, make_head(), torch.float32)


def test_a_torn_checkpoint_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "old") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(HarnessError, match=rf"{path}[\s\S]*whole safetensors"):
        load_drafter(path.parent, make_head(), torch.float32)
    (path.parent / "config.json").write_text("[1]")
    with pytest.raises(HarnessError, match=r"one JSON object[\s\S]*got: list"):
        load_drafter(path.parent, make_head(), torch.float32)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    head = make_head()
    first = load_drafter(saved(tmp_path / "a"), head, torch.float32)
    save_drafter(tmp_path / "b", first, head.config, torch.float32)
    assert torch.equal(probe(first), probe(load_drafter(tmp_path / "b", head, torch.float32)))


def test_layers_are_written_in_each_engines_convention(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path / "a") / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["norm_before_residual"] is False
    assert sglang_layer_ids([1, 14, 26], "llama") == [1, 14, 26]
    assert sglang_layer_ids([2, 30, 58], "kimi_k25") == [3, 31, 59]
    with pytest.raises(HarnessError, match="output of layer 0"):
        sglang_layer_ids([0, 30, 58], "deepseek_v3")


def test_a_foreign_config_is_read_by_vllms_key_and_never_guessed(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path / "a") / "config.json").read_text())
    del config["aux_layers"], config["head_dim"], config["target_hidden_size"]
    read = read_eagle_config(config, where="x")
    assert read.aux_layers == LAYERS
    assert (read.head_dim, read.target_hidden_size) == (E, H)
    del config["eagle_aux_hidden_state_layer_ids"]
    with pytest.raises(HarnessError, match="does not say which layers"):
        read_eagle_config(config, where="x")


def test_export_is_bfloat16_and_answers_alike(tmp_path: Path) -> None:
    head = make_head()
    error = export(saved(tmp_path / "a"), tmp_path / "out", head)
    assert 0 < error < 0.05
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert stored["d2t"].tolist() == [1, 3, 7]
    assert set(stored) == set(load_file(tmp_path / "a" / "model.safetensors"))


def test_export_refuses_what_sglang_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="SGLang does not run") as caught:
        export(saved(tmp_path / "a", norm_output=True), tmp_path / "out", make_head())
    assert "norm_output true" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_is_to_be_said_of_a_drafter_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, head = saved(tmp_path / "drafter"), make_head()
    other = replace(head, config=head.config.model_copy(update={"verifier": "another"}))
    for dtype in (torch.float32, torch.bfloat16):
        load_drafter(folder, other, dtype)
    assert caplog.messages == [f"{folder}: it was trained for tiny, not for another"]
