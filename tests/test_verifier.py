"""Reading verifiers: nested and flat configurations, weight names, the head file."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec
from eagle3.verifier_config import (
    NESTED,
    READ,
    flat_config,
    has_latent_attention,
    is_tied,
    quantisation,
)
from eagle3.verifier_files import link_verifier
from eagle3.verifier_head import read_head, write_head
from eagle3.verifier_model import decoder_of, load_model, load_tokenizer
from eagle3.weight_keys import find_keys

FLAT = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def _folder(path: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name.replace("__", "."): t for name, t in tensors.items()}, path / "model.safetensors"
    )
    return path


def test_nested_configuration_reads_like_the_flat_one(tmp_path: Path) -> None:
    flat = VerifierSpec.open(_folder(tmp_path / "m", FLAT, x=torch.zeros(1)))
    for name in ("text_config", "llm_config", "language_config"):
        config = {"model_type": "vision", name: FLAT, "vision_config": {"hidden_size": 99}}
        nested = VerifierSpec.open(_folder(tmp_path / name, config, x=torch.zeros(1)))
        ours = nested.head_config.model_dump() | {"verifier": "", "config_hash": ""}
        assert ours == flat.head_config.model_dump() | {"verifier": "", "config_hash": ""}
    assert flat.head_dim == 4
    assert (flat.rope_theta, flat.rope_scaling, flat.eos_token_ids) == (5e5, None, [2, 3])
    assert (flat.norm_offset, flat.embed_scale, flat.logit_scale) == (0.0, 1.0, 1.0)


def test_two_parts_for_the_language_model(tmp_path: Path) -> None:
    """Which one is served nobody can tell, so neither is read; two that agree are one."""

    def opened(name: str, config: dict[str, Any]) -> VerifierSpec:
        return VerifierSpec.open(_folder(tmp_path / name, config, x=torch.zeros(1)))

    other = FLAT | {"hidden_size": 16, "eos_token_id": 9}
    beside = {"model_type": "vision", "text_config": FLAT, "llm_config": other}
    nested = {"thinker_config": {"llm_config": FLAT, "language_config": other}}
    apart = {"thinker_config": {"text_config": FLAT}, "llm_config": other}
    for name, config, flat, differing in (
        ("beside", beside, "text_config", "llm_config"),
        ("nested", nested, "thinker_config.llm_config", "thinker_config.language_config"),
        ("apart", apart, "thinker_config.text_config", "llm_config"),
    ):
        with pytest.raises(HarnessError, match="more than one part for the language model") as said:
            opened(name, config)
        text = str(said.value)
        assert f"{tmp_path / name / 'config.json'}\n" in text
        assert "parts that agree in hidden_size, eos_token_id\n" in text
        assert f"{flat}: hidden_size 8, eos_token_id [2, 3]" in text
        assert f"{differing}: hidden_size 16, eos_token_id 9" in text

    # The same values twice; what is not read may differ.
    agreed = opened("agreed", beside | {"llm_config": FLAT | {"use_cache": False}})
    # An encoder's settings, or a stub, are no decoder.
    stub = opened("stub", {"text_config": {"model_type": "bert"}, "llm_config": FLAT})
    for spec in (agreed, stub):
        assert (spec.hidden_size, spec.eos_token_ids) == (8, [2, 3])


def test_all_that_is_read_of_a_configuration_is_compared() -> None:
    """`READ` names every key that the flat configuration is made of."""
    asked: set[str] = set()

    class Noting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            asked.add(key)
            return super().__getitem__(key)

    text = Noting(FLAT | {"head_dim": 4, "logits_scaling": 2.0, "final_logit_softcapping": 30.0})
    for latent in ({}, {"kv_lora_rank": 4}):
        text.update(latent)
        config = {"text_config": text}
        flat_config(config, {}, where="here")
        is_tied(config), quantisation(config), has_latent_attention(config)
    assert asked - set(NESTED) == set(READ)


def test_families_that_scale(tmp_path: Path) -> None:
    gemma = FLAT | {"model_type": "gemma2", "final_logit_softcapping": 30.0}
    spec = VerifierSpec.open(_folder(tmp_path / "gemma", gemma, x=torch.zeros(1)))
    assert (spec.norm_offset, spec.embed_scale, spec.logit_softcap) == (1.0, 8**0.5, 30.0)
    granite = FLAT | {"model_type": "granite", "logits_scaling": 4.0, "embedding_multiplier": 3.0}
    spec = VerifierSpec.open(_folder(tmp_path / "granite", granite, x=torch.zeros(1)))
    assert (spec.logit_scale, spec.embed_scale) == (0.25, 3.0)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    deepseek = FLAT | {"kv_lora_rank": 4, "v_head_dim": 16, "head_dim": 6, "rope_scaling": yarn}
    spec = VerifierSpec.open(_folder(tmp_path / "deepseek", deepseek, x=torch.zeros(1)))
    assert (spec.head_dim, spec.rope_scaling) == (16, yarn)


def test_generation_config_adds_its_ends(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", FLAT | {"eos_token_id": 7}, x=torch.zeros(1))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert VerifierSpec.open(folder).eos_token_ids == [5, 7]


@pytest.mark.parametrize(
    ("embed", "norm", "lm_head", "others"),
    [
        # DeepSeek's further head has an embedding of its own.
        (
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
            ["model.layers.61.embed_tokens.weight"],
        ),
        (
            "language_model.model.embed_tokens.weight",
            "language_model.model.norm.weight",
            "language_model.lm_head.weight",
            ["vision_tower.norm.weight"],
        ),
        (
            "model.language_model.embed_tokens.weight",
            "model.language_model.norm.weight",
            "lm_head.weight",
            ["model.visual.merger.norm.weight"],
        ),
        ("tok_embeddings.weight", "norm.weight", "output.weight", []),
    ],
    ids=["deepseek", "kimi", "qwen-vl", "mistral"],
)
def test_weight_names(embed: str, norm: str, lm_head: str, others: list[str]) -> None:
    keys = find_keys([embed, norm, lm_head, *others], 2, tied=False, where="test")
    assert (keys.embed, keys.norm, keys.lm_head, keys.layer) == (embed, norm, lm_head, None)


def test_two_candidates_or_none_are_errors() -> None:
    twice = ["a.model.embed_tokens.weight", "b.model.embed_tokens.weight", "model.norm.weight"]
    with pytest.raises(HarnessError, match="two stored tensors") as caught:
        find_keys(twice, 2, tied=True, where="test")
    assert "a.model.embed_tokens.weight, b.model.embed_tokens.weight" in str(caught.value)
    others = ["tok_embeddings.weight", "embed_tokens.weight", "norm.weight"]
    with pytest.raises(HarnessError, match="two stored tensors") as caught:
        find_keys(others, 2, tied=True, where="test")
    assert "got: tok_embeddings.weight, embed_tokens.weight" in str(caught.value)
    with pytest.raises(HarnessError, match="norm weight was not found"):
        find_keys(["model.embed_tokens.weight"], 2, tied=True, where="test")
    flat = ["model.embed_tokens.weight", "model.norm.weight"]
    with pytest.raises(HarnessError, match="lm_head"):
        find_keys(flat, 2, tied=False, where="test")
    assert find_keys(flat, 2, tied=None, where="test").lm_head is None


@pytest.mark.parametrize("tied", [True, False])
def test_head_holds_the_model_s_own_tensors(
    tied: bool, tiny_verifier: Path, tiny_verifier_untied: Path, tmp_path: Path
) -> None:
    spec = VerifierSpec.open(tiny_verifier if tied else tiny_verifier_untied)
    write_head(spec, tmp_path / "head.safetensors")
    head = read_head(tmp_path / "head.safetensors")
    model = load_model(spec, torch.bfloat16, "cpu")
    decoder = decoder_of(model)
    assert head.config == spec.head_config
    assert torch.equal(head.embed, decoder.embed_tokens.weight)
    assert torch.equal(head.lm_head, model.get_output_embeddings().weight)
    assert torch.equal(head.norm, decoder.norm.weight)
    assert head.layer is not None
    last = dict(decoder.layers[-1].named_parameters())
    assert head.layer.keys() == last.keys()
    assert all(torch.equal(head.layer[name], last[name]) for name in last)
    assert torch.equal(head.embed, head.lm_head) == tied
    with safe_open(tmp_path / "head.safetensors", "pt") as file:
        assert json.loads(file.metadata()["config"])["eos_token_ids"] == [2]


def test_only_needed_shards_are_opened(tiny_verifier_untied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    link_verifier(str(tiny_verifier_untied), folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    early = {name for name in tensors if ".layers.0." in name or ".layers.1." in name}
    late = {name: tensors[name] for name in tensors.keys() - early}
    save_file(late, folder / "b.safetensors")
    (folder / "a.safetensors").write_bytes(b"never opened")
    weight_map = {name: "a.safetensors" if name in early else "b.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_head(VerifierSpec.open(folder), tmp_path / "head.safetensors")
    head = read_head(tmp_path / "head.safetensors")
    assert torch.equal(head.lm_head, tensors["lm_head.weight"])


def _sharded(source: Path, folder: Path, home: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """The same verifier with each tensor in the shard that `home` names; its tensors."""
    link_verifier(str(source), folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: home(name) for name in tensors}
    for shard in set(places.values()):
        own = {name: tensor for name, tensor in tensors.items() if places[name] == shard}
        if shard.endswith(".bin"):
            torch.save(own, folder / shard)
        else:
            save_file(own, folder / shard)
    kind = "pytorch_model.bin" if shard.endswith(".bin") else "model.safetensors"
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tensors


def test_without_the_last_layer_no_layer_s_shard_is_needed(
    tiny_verifier_untied: Path, tmp_path: Path
) -> None:
    def home(name: str) -> str:
        return "layers.safetensors" if ".layers." in name else f"{name.split('.')[-2]}.safetensors"

    folder = tmp_path / "m"
    tensors = _sharded(tiny_verifier_untied, folder, home)
    (folder / "layers.safetensors").unlink()
    write_head(VerifierSpec.open(folder), tmp_path / "head", layer=False)
    head = read_head(tmp_path / "head")
    assert head.layer is None
    assert torch.equal(head.embed, tensors["model.embed_tokens.weight"])
    assert torch.equal(head.norm, tensors["model.norm.weight"])
    assert torch.equal(head.lm_head, tensors["lm_head.weight"])
    with pytest.raises(HarnessError, match=r"layers\.safetensors is missing"):
        write_head(VerifierSpec.open(folder), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_are_the_same_verifier(
    shards: int, tiny_verifier_untied: Path, tmp_path: Path
) -> None:
    source, folder = tiny_verifier_untied, tmp_path / "m"
    if shards > 1:
        _sharded(source, folder, lambda name: f"pytorch_model-{len(name) % shards}.bin")
    else:
        link_verifier(str(source), folder)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    linked = tmp_path / "linked"
    link_verifier(str(folder), linked)
    spec, whole = VerifierSpec.open(linked), VerifierSpec.open(source)
    write_head(spec, tmp_path / "a")
    write_head(whole, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert spec.revision == VerifierSpec.open(folder).revision != whole.revision
    ids = torch.arange(6)[None]
    ours, theirs = (load_model(s, torch.float32, "cpu")(ids).logits for s in (spec, whole))
    assert torch.equal(ours, theirs)
    first = sorted(linked.glob("pytorch_model*.bin"))[0].resolve()
    torch.save({"model.norm.weight": Path("x")}, first)
    with pytest.raises(HarnessError, match=rf"could run code[\s\S]*{first.name}"):
        write_head(VerifierSpec.open(folder), tmp_path / "c")


def test_a_shape_that_the_configuration_denies(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path / "m",
        FLAT,
        model__embed_tokens__weight=torch.zeros(12, 8),
        model__norm__weight=torch.zeros(8),
        lm_head__weight=torch.zeros(10, 8),
    )
    with pytest.raises(HarnessError, match="embed weight does not fit") as caught:
        write_head(VerifierSpec.open(folder), tmp_path / "head.safetensors")
    assert "[10, 8]" in str(caught.value) and "[12, 8]" in str(caught.value)
    assert not (tmp_path / "head.safetensors").exists()


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"config\.json is missing"):
        VerifierSpec.open(tmp_path / "nothing" / "here")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FLAT | {"hidden_size": None}))
    with pytest.raises(HarnessError, match="lacks a key") as caught:
        VerifierSpec.open(folder)
    assert "hidden_size" in str(caught.value)
    (folder / "config.json").write_text(json.dumps(FLAT))
    with pytest.raises(HarnessError, match="no weights that are read"):
        _ = VerifierSpec.open(folder).keys
    with pytest.raises(HarnessError, match="head is missing"):
        read_head(tmp_path / "head.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(HarnessError, match="not a verifier head"):
        read_head(tmp_path / "other.safetensors")


def test_broken_files_are_named(tiny_verifier: Path, tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        shutil.copytree(tiny_verifier, tmp_path / name)
        return tmp_path / name

    torn = copied("torn") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(HarnessError, match=rf"{torn}[\s\S]*whole safetensors[\s\S]*save the verif"):
        _ = VerifierSpec.open(torn.parent).keys
    head = tmp_path / "head.safetensors"
    head.write_bytes(b"no weights")
    with pytest.raises(HarnessError, match=rf"{head}[\s\S]*10 bytes[\s\S]*verifier stage again"):
        read_head(head)
    for name, text in (("config.json", "[1]"), ("generation_config.json", "{")):
        path = copied(name) / name
        path.write_text(text)
        with pytest.raises(HarnessError, match=rf"{path}[\s\S]*one JSON object"):
            VerifierSpec.open(path.parent)
    index = copied("index") / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(HarnessError, match=rf"{index}[\s\S]*weight_map"):
        _ = VerifierSpec.open(index.parent).keys
    odd = copied("odd") / "config.json"
    odd.write_text(json.dumps(json.loads(odd.read_text()) | {"hidden_size": "64"}))
    with pytest.raises(HarnessError, match=r"hidden_size[\s\S]*whole number[\s\S]*'64'"):
        VerifierSpec.open(odd.parent)
    (copied("mute") / "tokenizer.json").unlink()
    with pytest.raises(HarnessError, match="tokenizer cannot be loaded"):
        load_tokenizer(VerifierSpec.open(tmp_path / "mute"))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("rms_norm_eps", "1e-5x", "a number"),
        ("rms_norm_eps", math.nan, "a number"),
        ("rope_theta", "much", "a number"),
        ("rope_parameters", [1], "an object with keys"),
        ("rope_parameters", {"full_attention": 5}, "an object with keys"),
        ("logit_scale", "x", "a number"),
        ("logits_scaling", [1], "a number"),
        ("embedding_multiplier", "12", "a number"),
        ("final_logit_softcapping", "x", "a number"),
        ("final_logit_softcapping", 0, "above 0, or null"),
        ("eos_token_id", "</s>", "a token id, or a list of them"),
        ("eos_token_id", [[1], 3], "a token id, or a list of them"),
    ],
)
def test_values_of_another_kind_are_named(
    tmp_path: Path, key: str, value: object, rule: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLAT | {"head_dim": 4, key: value}))
    with pytest.raises(HarnessError, match="configuration cannot be used") as caught:
        VerifierSpec.open(tmp_path)
    text = str(caught.value)
    assert key in text and f"rule: {rule}\n" in text and "\n  got: " in text


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_that_names_the_wrong_file(tmp_path: Path, kind: str) -> None:
    weights = {"model.embed_tokens.weight": torch.ones(10, 8), "model.norm.weight": torch.ones(8)}
    folder = _folder(tmp_path / "m", FLAT | {"tie_word_embeddings": True})
    places = dict.fromkeys(weights, f"one.{kind}")
    name = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    (folder / f"{name}.{kind}.index.json").write_text(json.dumps({"weight_map": places}))
    lacking = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]}
    save = save_file if kind == "safetensors" else torch.save
    save(lacking, folder / f"one.{kind}")
    with pytest.raises(HarnessError, match=r"lacks them[\s\S]*one\.[\s\S]*model.norm.weight"):
        write_head(VerifierSpec.open(folder), tmp_path / "head")
    (folder / f"one.{kind}").unlink()
    with pytest.raises(HarnessError, match=r"one\.\w+ is missing[\s\S]*download or save the verif"):
        write_head(VerifierSpec.open(folder), tmp_path / "head")


def test_bytes_that_are_no_pickle(tmp_path: Path) -> None:
    """torch's reader stumbles over them in many ways: an index, a key, a character."""
    for number, data in enumerate((b"root:x:0:0\nq\x00", b"hello world\n" * 50, b"", b"\x80\x02.")):
        folder = _folder(tmp_path / str(number), FLAT)
        (folder / "pytorch_model.bin").write_bytes(data)
        for leftover in folder.glob("*.safetensors"):
            leftover.unlink()
        with pytest.raises(HarnessError, match=r"pytorch_model.bin[\s\S]*torch"):
            _ = VerifierSpec.open(folder).keys


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float) -> None:
    head = torch.ones(10, 8, dtype=torch.bfloat16)
    head[4, 3] = value
    folder = _folder(
        tmp_path / "m", FLAT, model__embed_tokens__weight=torch.ones(10, 8),
        model__norm__weight=torch.ones(8), lm_head__weight=head,
    )  # fmt: skip
    with pytest.raises(HarnessError, match=r"lm_head weight holds a NaN[\s\S]*lm_head.weight"):
        write_head(VerifierSpec.open(folder), tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_a_tied_output_that_is_stored_otherwise(tmp_path: Path) -> None:
    """transformers and engines would serve the embedding; a head of the other matrix is no head of
    what is served."""
    weights = {
        "model__embed_tokens__weight": torch.ones(10, 8),
        "model__norm__weight": torch.ones(8),
    }
    tied = FLAT | {"tie_word_embeddings": True}
    same = _folder(tmp_path / "a", tied, **weights, lm_head__weight=torch.ones(10, 8))
    write_head(VerifierSpec.open(same), tmp_path / "head")
    other = _folder(tmp_path / "b", tied, **weights, lm_head__weight=torch.zeros(10, 8))
    with pytest.raises(HarnessError, match=r"ties its output[\s\S]*lm_head.weight[\s\S]*differ"):
        write_head(VerifierSpec.open(other), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_no_chat_template_is_an_error(tiny_verifier: Path, tmp_path: Path) -> None:
    link_verifier(str(tiny_verifier), tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(HarnessError, match="chat template"):
        load_tokenizer(VerifierSpec.open(tmp_path / "m"))


def test_linked_verifier_is_the_same_and_names_where_it_came_from(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    link_verifier(str(tiny_verifier), tmp_path / "linked")
    linked, original = VerifierSpec.open(tmp_path / "linked"), VerifierSpec.open(tiny_verifier)
    assert linked.verifier == tiny_verifier.name
    assert (linked.config_hash, linked.revision) == (original.config_hash, original.revision)
    assert (tmp_path / "linked" / "model.safetensors").is_symlink()
