"""Drafters that others published: read in their layouts, remapped, or refused with both values."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.arm import init_digest
from eagle3.checkpoint import CONFIG, WEIGHTS, load_drafter
from eagle3.errors import HarnessError
from eagle3.export import probe
from eagle3.formats.published import layers_said, read_published, resolve_drafter
from eagle3.initialise import from_checkpoint
from tests.tiny_head import LAYERS, E, H, V, make_head, saved, vocabulary

MINE = vocabulary(1, 4, 9)


def change(folder: Path, **values: Any) -> Path:
    """A config whose keys differ; None takes a key away."""
    path = folder / CONFIG
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def as_published(folder: Path) -> Path:
    """What is ours alone in a config, taken away; as SGLang's layout has it."""
    return change(folder, aux_layers=None, verifier=None, eagle_aux_hidden_state_layer_ids=None)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def speculators(folder: Path) -> Path:
    """The same drafter as speculators lays it out, written by hand."""
    config = json.loads((folder / CONFIG).read_text())
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act")
    layer = {"model_type": "llama", "num_hidden_layers": 1} | {n: config[n] for n in names}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    foreign = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "other/Model"}},
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in LAYERS],
    }
    (folder / CONFIG).write_text(json.dumps(foreign))
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors_of(folder).items()}
    tensors["embed_tokens.weight"] = make_head().embed.bfloat16()
    tensors["verifier_norm.weight"] = torch.ones(H)
    save_file(tensors, folder / WEIGHTS)
    return folder


def test_speculators_layout_is_the_same_drafter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = probe(from_checkpoint(saved(tmp_path / "a"), make_head(), MINE, LAYERS))
    drafter = from_checkpoint(speculators(saved(tmp_path / "b")), make_head(), MINE, LAYERS)
    assert torch.equal(probe(drafter), expected)
    text = "\n".join(caplog.messages)
    assert "trained for other/Model, not for tiny" in text
    assert "its embedding is the verifier's" in text


def test_a_pickle_of_tensors_is_the_same_drafter(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    expected = from_checkpoint(folder, make_head(), MINE, LAYERS)
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    back = from_checkpoint(folder, make_head(), MINE, LAYERS)
    assert torch.equal(probe(back), probe(expected))
    assert len(init_digest(folder)) == 64
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(HarnessError, match=r"could run code[\s\S]*pytorch_model.bin"):
        from_checkpoint(folder, make_head(), MINE, LAYERS)


def test_sharded_weights_are_joined(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    expected = from_checkpoint(folder, make_head(), MINE, LAYERS)
    tensors = tensors_of(folder)
    first = {n: t for n, t in tensors.items() if n.startswith("midlayer")}
    save_file(first, folder / "a.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in first}, folder / "b.safetensors")
    places = {n: "a.safetensors" if n in first else "b.safetensors" for n in tensors}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()
    assert torch.equal(probe(from_checkpoint(folder, make_head(), MINE, LAYERS)), probe(expected))


def test_sharded_pickles_are_joined(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    expected = from_checkpoint(folder, make_head(), MINE, LAYERS)
    tensors = tensors_of(folder)
    places = {n: f"pytorch_model-{len(n) % 2}.bin" for n in tensors}
    for shard in set(places.values()):
        torch.save({n: t for n, t in tensors.items() if places[n] == shard}, folder / shard)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()
    assert torch.equal(probe(from_checkpoint(folder, make_head(), MINE, LAYERS)), probe(expected))
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model-0.bin")
    with pytest.raises(HarnessError, match=r"could run code[\s\S]*pytorch_model-0.bin"):
        read_published(folder, make_head())
    index.write_text('{"weight_map": ["a"]}')
    with pytest.raises(HarnessError, match=r"index[\s\S]*weight_map: tensor names[\s\S]*\['a'\]"):
        read_published(folder, make_head())


def test_a_full_vocabulary_without_d2t(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = as_published(saved(tmp_path / "a"))
    rows = torch.randn(V, H, generator=torch.Generator().manual_seed(5))
    tensors = tensors_of(folder) | {"lm_head.weight": rows}
    save_file({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, folder / WEIGHTS)
    change(folder, draft_vocab_size=None)
    drafter = from_checkpoint(folder, make_head(), vocabulary(2, 7, 8, 20), LAYERS)
    assert torch.equal(drafter.lm_head.weight, rows[[2, 7, 8, 20]])
    text = "\n".join(caplog.messages)
    assert f"full vocabulary of {V} tokens: no d2t" in text
    assert "4 of 4 head rows (100.0%)" in text and "26 of its 30 tokens are not drafted" in text


def test_another_width_and_what_differs_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = saved(tmp_path / "a", intermediate_size=40, rope_theta=1e6, layer_init="random")
    drafter = from_checkpoint(as_published(folder), make_head(), vocabulary(4, 5), LAYERS)
    assert drafter.midlayer.mlp.up_proj.weight.shape == (40, H)
    assert torch.equal(
        drafter.midlayer.mlp.up_proj.weight, tensors_of(folder)["midlayer.mlp.up_proj.weight"]
    )
    text = "\n".join(caplog.messages)
    assert "intermediate_size is 40, where one from scratch has 24" in text
    assert "rope_theta is 1000000.0, where one from scratch has 10000.0" in text
    assert "1 of 2 head rows (50.0%) come from" in text and "1 (50.0%) from the verifier" in text


def test_an_embedding_of_its_own_is_counted(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    head = make_head()
    embed = head.embed.clone()
    embed[[3, 5]] += 1.0
    save_file(tensors_of(folder) | {"embed_tokens.weight": embed}, folder / WEIGHTS)
    notes = read_published(folder, head).notes
    assert any("differs from the verifier's in 2 of 30 rows" in note for note in notes)
    save_file(tensors_of(folder) | {"embed_tokens.weight": embed[:9].clone()}, folder / WEIGHTS)
    with pytest.raises(HarnessError, match=r"not of this verifier[\s\S]*30, 16[\s\S]*9, 16"):
        read_published(folder, head)


def test_token_ids_for_offsets_are_turned_round(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    old = tensors_of(folder)
    save_file(old | {"d2t": torch.tensor([1, 4, 9])}, folder / WEIGHTS)
    published = read_published(folder, make_head())
    assert published.tensors["d2t"].tolist() == [1, 3, 7] == old["d2t"].tolist()
    assert any("turned into offsets" in note for note in published.notes)


def test_a_map_without_t2d(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    alone = {n: t for n, t in tensors_of(folder).items() if n != "t2d"}

    def read(d2t: list[int]) -> tuple[list[int], list[int], str]:
        save_file(alone | {"d2t": torch.tensor(d2t)}, folder / WEIGHTS)
        found = read_published(folder, make_head())
        drafted = found.tensors["t2d"].nonzero()[:, 0].tolist()
        return found.tensors["d2t"].tolist(), drafted, "; ".join(found.notes)

    offsets, drafted, notes = read([1, 3, 7])
    assert (offsets, drafted) == ([1, 3, 7], [1, 4, 9])
    assert "no t2d: d2t is read as offsets" in notes
    # As offsets these would be tokens 1, 5 and 31 of 30.
    offsets, drafted, notes = read([1, 4, 29])
    assert (offsets, drafted) == ([1, 3, 27], [1, 4, 29])
    assert "turned into offsets" in notes
    # As offsets these are tokens 9, 9 and 4; as token ids 9, 8 and 2.
    assert read([9, 8, 2])[0] == [9, 7, 0]
    with pytest.raises(HarnessError, match=r"twice[\s\S]*token 5 at draft ids 0, 2; 1 such"):
        read([5, 5, 3])
    with pytest.raises(
        HarnessError, match=r"beyond the verifier's[\s\S]*0 to 29[\s\S]*got: 0 to 32"
    ):
        read([0, 0, 30])


def test_a_missing_head_starts_from_the_verifier(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / WEIGHTS)
    drafter = from_checkpoint(folder, make_head(), MINE, LAYERS)
    assert torch.equal(drafter.lm_head.weight, make_head().lm_head[[1, 4, 9]])


def test_layers_by_each_engines_key() -> None:
    def said(model_type: str, **config: Any) -> list[int] | None:
        return layers_said(config, model_type, where=Path("config.json"))

    nested = "eagle_aux_hidden_state_layer_ids"
    assert said("llama", **{nested: [3, 31, 59]}) == [2, 30, 58]
    assert said("llama", eagle_config={nested: [1, 14, 26]}) == [1, 14, 26]
    assert said("kimi_k25", eagle_config={nested: [3, 31, 59]}) == [2, 30, 58]
    assert said("kimi_k25", eagle_config={nested: [1, 29, 57]}) == [1, 29, 57]
    both = {nested: [3, 31, 59], "eagle_config": {nested: [3, 31, 59]}}
    assert said("kimi_k25", **both) == [2, 30, 58]
    with pytest.raises(
        HarnessError, match=r"\[2, 30, 58\][\s\S]*\[3, 31, 59\][\s\S]*--drafter-aux"
    ):
        said("llama", **both)
    assert said("llama") is None


def test_layers_that_nobody_wrote_down_are_asked_for(tmp_path: Path) -> None:
    folder = change(as_published(saved(tmp_path / "a")), eagle_config=None)
    with pytest.raises(HarnessError, match=r"does not say which layers[\s\S]*--drafter-aux-layers"):
        from_checkpoint(folder, make_head(), MINE, LAYERS)
    drafter = from_checkpoint(folder, make_head(), MINE, LAYERS, [0, 2, 3])
    assert drafter.config.aux_layers == LAYERS
    with pytest.raises(HarnessError, match=r"\[0, 2, 3\][\s\S]*\[0, 1, 2\][\s\S]*scratch"):
        from_checkpoint(folder, make_head(), MINE, LAYERS, [0, 1, 2])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 2}, r"num_hidden_layers[\s\S]*rule: 1\n[\s\S]*got: 2"),
        ({"attention_bias": True}, r"attention_bias[\s\S]*rule: False[\s\S]*got: True"),
        ({"kv_lora_rank": 512}, r"latent attention[\s\S]*got: 512"),
        ({"hidden_act": "gelu"}, r"hidden_act[\s\S]*rule: silu[\s\S]*got: gelu"),
        ({"vocab_size": 31}, r"another vocabulary[\s\S]*tiny: 30[\s\S]*got: 31"),
        ({"target_hidden_size": 32}, r"another hidden size[\s\S]*tiny: 16[\s\S]*got: 32"),
        ({"aux_layers": [0, 2, 9]}, r"does not have[\s\S]*0 to 4[\s\S]*\[0, 2, 9\]"),
        (
            {"verifier": {"name": "x", "model_type": "qwen3"}},
            r"another kind[\s\S]*tiny: llama[\s\S]*got: qwen3",
        ),
        (
            {"aux_layers": None, "eagle_config": [3, 31]},
            r"json, eagle_config\n[\s\S]*object[\s\S]*list: \[3, 31\]",
        ),
        ({"transformer_layer_config": "x"}, r"transformer_layer_config\n[\s\S]*got: str: 'x'"),
        ({"verifier": "org/Name"}, r"json, verifier\n[\s\S]*got: str: 'org/Name'"),
        ({"speculators_config": [1]}, r"json, speculators_config\n[\s\S]*got: list"),
        ({"rope_scaling": ["yarn"]}, r"json, rope_scaling\n[\s\S]*got: list"),
        ({"rope_theta": "1e6"}, r"json, rope_theta\n[\s\S]*a number[\s\S]*'1e6'"),
        ({"aux_layers": "0,2,3"}, r"json, aux_layers\n[\s\S]*list of whole[\s\S]*'0,2,3'"),
        (
            {"aux_layers": None, "eagle_aux_hidden_state_layer_ids": {"a": 1}},
            r"layer_ids\n[\s\S]*list of whole",
        ),
        ({"speculators_model_type": "peagle"}, r"rule: eagle3[\s\S]*got: peagle"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    folder = change(saved(tmp_path / "a"), **values)
    with pytest.raises(HarnessError, match=message) as caught:
        from_checkpoint(folder, make_head(), MINE, LAYERS)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["model.fc.weight", "layers.0.hidden_norm.weight"])
def test_a_tensor_under_two_names(tmp_path: Path, name: str) -> None:
    folder = as_published(saved(tmp_path / "a"))
    tensors = tensors_of(folder)
    ours = name.removeprefix("model.").replace("layers.0.", "midlayer.")
    save_file(tensors | {name: tensors[ours] + 1}, folder / WEIGHTS)
    with pytest.raises(HarnessError, match=rf"one and the same[\s\S]*one {ours}[\s\S]*second"):
        read_published(folder, make_head())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_drafter_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its values without their scales are numbers of no meaning."""
    folder = saved(tmp_path / "a")
    tensors = tensors_of(folder)
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(dtype)}, folder / WEIGHTS)
    for read in (read_published, lambda f, h: load_drafter(f, h, torch.float32)):
        with pytest.raises(HarnessError, match=r"plain floats[\s\S]*fc.weight[\s\S]*not quant"):
            read(folder, make_head())


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn"},
        {"rope_type": "yarn", "factor": "64"},
        {"rope_type": "llama3", "factor": 0.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0,
         "original_max_position_embeddings": 0},
    ],
)  # fmt: skip
def test_rope_that_cannot_be_computed(tmp_path: Path, scaling: dict[str, Any]) -> None:
    folder = change(saved(tmp_path / "a"), rope_scaling=scaling)
    with pytest.raises(HarnessError, match=r"cannot be computed[\s\S]*rope_scaling[\s\S]*plain"):
        from_checkpoint(folder, make_head(), MINE, LAYERS)
    folder = change(saved(tmp_path / "b"), rope_theta=0)
    with pytest.raises(HarnessError, match=r"rope_theta = 0"):
        from_checkpoint(folder, make_head(), MINE, LAYERS)


def test_a_map_of_fractions(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    tensors = tensors_of(folder)
    whole = tensors["d2t"].float()
    save_file(tensors | {"d2t": whole}, folder / WEIGHTS)
    assert torch.equal(read_published(folder, make_head()).tensors["d2t"], tensors["d2t"])
    for odd in (whole + 0.5, whole * torch.nan):
        save_file(tensors | {"d2t": odd}, folder / WEIGHTS)
        with pytest.raises(HarnessError, match=r"something else than whole[\s\S]*torch.float32"):
            read_published(folder, make_head())


def test_nested_layers_of_another_type(tmp_path: Path) -> None:
    folder = as_published(saved(tmp_path / "a"))
    for ids in (["1", "2"], 5, [1.5, 2.5, 3.5]):
        change(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
        with pytest.raises(HarnessError, match=r"eagle_config.eagle_aux[\s\S]*list of whole"):
            read_published(folder, make_head())


def test_other_refusals(tmp_path: Path) -> None:
    folder = speculators(saved(tmp_path / "open"))
    change(folder, norm_before_residual=None)
    with pytest.raises(HarnessError, match=r"leaves open[\s\S]*norm_before_residual"):
        read_published(folder, make_head())
    folder = saved(tmp_path / "first")
    save_file({"embed_tokens.weight": torch.zeros(V, H)}, folder / WEIGHTS)
    with pytest.raises(HarnessError, match=r"fc.weight over aux hidden states[\s\S]*Llama"):
        read_published(folder, make_head())
    folder = saved(tmp_path / "more")
    save_file(tensors_of(folder) | {"midlayer.q_norm.weight": torch.ones(E)}, folder / WEIGHTS)
    with pytest.raises(HarnessError, match=r"unknown: midlayer.q_norm.weight"):
        from_checkpoint(folder, make_head(), MINE, LAYERS)
    folder = saved(tmp_path / "none")
    (folder / WEIGHTS).unlink()
    with pytest.raises(HarnessError, match=r"file is missing[\s\S]*pytorch_model.bin[\s\S]*config"):
        read_published(folder, make_head())
    with pytest.raises(HarnessError, match=r"nothing to start from[\s\S]*hub id"):
        resolve_drafter(str(tmp_path / "nothing"))
    assert resolve_drafter(str(folder)) == folder


def test_a_drafter_that_no_hub_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `checkpoints/base` is in a clone without results: of the hub's page, the first line."""

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no such name\nAn error happened while trying to locate the files")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(HarnessError) as caught:
        resolve_drafter("checkpoints/base")
    text = str(caught.value)
    assert "got: no such name\n" in text and "An error happened" not in text
    assert "make repro" in text
