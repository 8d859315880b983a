"""Verifiers of the families people serve: their head file gives the model's own logits."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import embedding
from eagle3.dequantise import dequantise, scaled_fp8, unpack
from eagle3.drafter import rms_norm
from eagle3.errors import HarnessError
from eagle3.logits import finish_logits
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from eagle3.verifier_model import decoder_of, load_model, load_tokenizer
from tests.families import DEEPSEEK, FAMILIES, TEXT, make_family


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("family") / request.param
    model = make_family(request.param, folder)
    write_head(VerifierSpec.open(folder), folder.with_suffix(".head"))
    return request.param, folder, model, read_head(folder.with_suffix(".head"))


@torch.no_grad()
def test_the_head_gives_the_models_logits(family: tuple[str, Path, Any, VerifierHead]) -> None:
    """From before the last norm to logits, and from token ids to what the first layer reads."""
    name, _, model, head = family
    decoder = decoder_of(model)
    seen: dict[str, torch.Tensor] = {}
    decoder.layers[0].register_forward_pre_hook(
        lambda module, inputs: seen.__setitem__("first", inputs[0])
    )
    decoder.layers[-1].register_forward_hook(
        lambda module, inputs, output: seen.__setitem__(
            "last", output[0] if isinstance(output, tuple) else output
        )
    )
    ids = torch.randint(3, 500, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids, use_cache=False).logits[0]
    config = head.config
    final = rms_norm(seen["last"][0], head.norm + config.norm_offset, config.rms_norm_eps)
    logits = finish_logits(
        final @ head.lm_head.T, scale=config.logit_scale, softcap=config.logit_softcap
    )
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(embedding(head, torch.float32)[ids[0]], seen["first"][0])
    assert (head.layer is not None) == (name in ("llama3", "qwen3", "qwen3_vl"))


def test_what_a_configuration_says(family: tuple[str, Path, Any, VerifierHead]) -> None:
    name, _, _, head = family
    config = head.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 5, 512)
    assert config.eos_token_ids == [2]
    deepseek = name in ("deepseek_v3", "kimi_k2", "kimi_k25")
    assert config.head_dim == (16 if deepseek or name in ("llama3", "gpt_oss") else 32)
    gemma = name in ("gemma2", "gemma3")
    assert (config.norm_offset, config.embed_scale) == ((1.0, 8.0) if gemma else (0.0, 1.0))
    assert config.logit_softcap == (5.0 if name == "gemma2" else None)
    if deepseek:
        assert config.rope_theta == 50000.0
        assert config.rope_scaling is not None and config.rope_scaling["factor"] == 64.0
    thetas = {"llama3": 5e5, "qwen3_vl": 5e6, "gemma3": 1e6}
    assert config.rope_theta == thetas.get(name, config.rope_theta)


def test_loads_unless_its_code_is_its_own(family: tuple[str, Path, Any, VerifierHead]) -> None:
    name, folder, model, _ = family
    if name == "kimi_k2":
        with pytest.raises(HarnessError, match=r"run\.trust_remote_code: true in params.yaml"):
            load_model(VerifierSpec.open(folder), torch.float32, "cpu")
        return
    loaded = load_model(VerifierSpec.open(folder), torch.float32, "cpu")
    ours, theirs = loaded.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_tokenizer_of_its_own_code_is_not_run_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "kimi"
    folder.mkdir()
    config = DEEPSEEK | {"model_type": "kimi_k2"}
    config |= {"auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    own = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    own |= {"tokenizer_class": "TikTokenTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(HarnessError, match=r"tokenizer is code[\s\S]*trust_remote_code: true"):
        load_tokenizer(VerifierSpec.open(folder))


def test_trusted_code_runs(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model type that only the folder's own code knows."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny_verifier / name).read_bytes())
    (folder / "model.safetensors").write_bytes((tiny_verifier / "model.safetensors").read_bytes())
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((tiny_verifier / "config.json").read_text())
    config |= {"model_type": "own_kind", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HarnessError, match="is not run unasked"):
        load_model(VerifierSpec.open(folder), torch.float32, "cpu")
    spec = VerifierSpec.open(folder, trust_remote_code=True)
    loaded = load_model(spec, torch.float32, "cpu")
    assert type(loaded).__name__ == "OwnForCausalLM"
    plain = load_model(VerifierSpec.open(tiny_verifier), torch.float32, "cpu")
    assert torch.equal(loaded.get_input_embeddings().weight, plain.get_input_embeddings().weight)


def test_sizes_that_are_left_out_are_the_model_types(tmp_path: Path) -> None:
    """As published Gemma 3: neither vocabulary nor head size nor RoPE base are written."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = tmp_path / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    spec = VerifierSpec.open(folder)
    assert (spec.vocab_size, spec.head_dim) == (262208, 256)
    assert (spec.max_position_embeddings, spec.rope_theta) == (131072, 1e6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_however_deep(depth: int, tmp_path: Path) -> None:
    config: dict[str, Any] = TEXT | {"model_type": "qwen3", "head_dim": 32}
    for name in ("text_config", "thinker_config", "llm_config")[:depth]:
        config = {"model_type": "whole", name: config, "vision_config": {"hidden_size": 9}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert VerifierSpec.open(tmp_path).hidden_size == 64


# --- quantised checkpoints ---

FOUR_BITS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*"],
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def pack(values: torch.Tensor) -> torch.Tensor:
    """Signed 4-bit integers [O, I] to words [O, I/8], written digit by digit."""
    words = []
    for row in (values + 8).tolist():
        row += [0] * (-len(row) % 8)
        word = [
            sum(v << (4 * i) for i, v in enumerate(row[at : at + 8]))
            for at in range(0, len(row), 8)
        ]
        words.append([w - (1 << 32) if w >= 1 << 31 else w for w in word])
    return torch.tensor(words, dtype=torch.int32)


def test_packed_integers_by_hand() -> None:
    values = torch.tensor([[-8, -1, 0, 1, 2, 3, 7, -3, 5, 4]])
    assert unpack(pack(values), 4, 10).tolist() == values.tolist()
    parts = {"weight_packed": pack(values), "weight_shape": torch.tensor([1, 10])}
    parts["weight_scale"] = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)
    weight = dequantise("x.weight", parts, four_bits(5), where="test")
    assert weight.dtype == torch.bfloat16
    assert weight.tolist() == [[-4, -0.5, 0, 0.5, 1, 6, 14, -6, 10, 8]]


def four_bits(group_size: object, num_bits: object = 4) -> dict[str, Any]:
    weights = {"num_bits": num_bits, "group_size": group_size}
    return {"config_groups": {"group_0": {"weights": weights}}}


def test_parts_of_a_packed_weight_that_do_not_fit() -> None:
    """Each of these ended in a traceback, or in numbers of no meaning."""
    values = torch.zeros(2, 16, dtype=torch.int32)
    good = {"weight_packed": pack(values), "weight_scale": torch.ones(2, 2)}
    assert dequantise("x.weight", good, four_bits(8), where="t").shape == (2, 16)
    row = good | {"weight_scale": torch.ones(2, 1)}
    assert dequantise("x.weight", row, four_bits(None), where="t").shape == (2, 16)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"weight_scale": None}, four_bits(8), r"packed without its scale[\s\S]*x.weight_scale"),
        ({"weight_scale": torch.ones(2, 3)}, four_bits(8), r"scales \[2, 2\][\s\S]*\[2, 3\]"),
        ({"weight_scale": torch.ones(2, 0)}, four_bits(8), r"scales \[2, 2\][\s\S]*\[2, 0\]"),
        ({"weight_scale": torch.ones(2)}, four_bits(8), r"scales \[2, 2\][\s\S]*scales \[2\]"),
        ({"weight_scale": torch.ones(2, 2) * math.nan}, four_bits(8), "NaN or infinity"),
        ({"weight_scale": torch.ones(2, 2).byte()}, four_bits(8), r"no floating[\s\S]*uint8"),
        ({"weight_packed": pack(values).byte()}, four_bits(8), r"not understood[\s\S]*torch.uint8"),
        ({"weight_shape": torch.tensor([2, 16, 1])}, four_bits(8), r"fit each other[\s\S]*16, 1\]"),
        ({"weight_shape": torch.tensor([2.0, 16.0])}, four_bits(8), "do not fit each other"),
        ({}, four_bits(8, "4"), r"not understood[\s\S]*got: '4' bits"),
        ({}, four_bits(8, 0), r"not understood[\s\S]*got: 0 bits"),
        ({}, {"config_groups": [4]}, r"not understood[\s\S]*got: None bits"),
        ({}, {"config_groups": {"group_0": None}}, r"not understood[\s\S]*got: None bits"),
    ]
    for change, settings, message in cases:
        parts = {name: part for name, part in (good | change).items() if part is not None}
        with pytest.raises(HarnessError, match=message):
            dequantise("x.weight", parts, settings, where="t")


def test_parts_of_an_fp8_weight_that_do_not_fit() -> None:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scale, blocks = torch.ones(2, 2), {"weight_block_size": [2, 2]}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"weight_scale_inv": scale * math.inf}, blocks, "NaN or infinity"),
        # Exponents alone, as MX formats store them: 127 stands for 1.
        ({"weight_scale": (scale * 127).byte()}, blocks, r"no floating point[\s\S]*torch.uint8"),
        ({"weight_scale_inv": scale}, {"weight_block_size": "2"}, r"blocks[\s\S]*got: '2'"),
        ({"weight_scale_inv": scale}, {"weight_block_size": [0, 2]}, r"above 0[\s\S]*\[0, 2\]"),
        ({"weight_scale_inv": scale}, {"weight_block_size": [2]}, r"two whole[\s\S]*\[2\]"),
        ({"weight": weight[0], "weight_scale": torch.ones(4)}, blocks, r"fp8 vector[\s\S]*\[4\]"),
    ]
    for parts, settings, message in cases:
        with pytest.raises(HarnessError, match=message):
            dequantise("x.weight", {"weight": weight} | parts, settings, where="t")


def test_fp8_scales_by_block_row_and_tensor() -> None:
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    blocks = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    expected = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    assert scaled_fp8(weight, blocks, (2, 2), where="x").tolist() == expected
    rows = torch.tensor([1.0, 2.0, 3.0])
    assert scaled_fp8(weight, rows, (2, 2), where="x")[:, 0].tolist() == [1, 2, 3]
    assert scaled_fp8(weight, rows[:, None], (2, 2), where="x")[:, 4].tolist() == [1, 2, 3]
    assert scaled_fp8(weight, torch.tensor([0.5]), (2, 2), where="x").unique().tolist() == [0.5]
    with pytest.raises(HarnessError, match=r"do not fit it[\s\S]*\[2, 3\][\s\S]*\[3, 3\]"):
        scaled_fp8(weight, torch.ones(3, 3), (2, 2), where="x")


def _quantised(source: Path, folder: Path, settings: dict[str, Any], change: Any) -> Path:
    """The verifier in `source` with the weights that `change` returns instead of some."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    return folder


def test_a_packed_head_and_layer(tiny_verifier_untied: Path, tmp_path: Path) -> None:
    whole: dict[str, torch.Tensor] = {}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [n for n in tensors if n.endswith("_proj.weight") or n == "lm_head.weight"]:
            weight = tensors.pop(name).float()
            scale = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7).to(torch.bfloat16)
            wide = scale.float().repeat_interleave(32, 1)
            values = (weight / wide).round().clamp(-8, 7).int()
            whole[name] = (values * wide).to(torch.bfloat16)
            stem = name.removesuffix("weight")
            tensors[stem + "weight_packed"] = pack(values)
            tensors[stem + "weight_scale"] = scale
            tensors[stem + "weight_shape"] = torch.tensor(weight.shape)
        return tensors

    folder = _quantised(tiny_verifier_untied, tmp_path / "int4", FOUR_BITS, change)
    write_head(VerifierSpec.open(folder), tmp_path / "head")
    head = read_head(tmp_path / "head")
    assert torch.equal(head.lm_head, whole["lm_head.weight"])
    assert head.layer is not None
    for name, weight in head.layer.items():
        if name.endswith("_proj.weight"):
            assert torch.equal(weight, whole[f"model.layers.4.{name}"])


def test_an_fp8_head_with_block_scales(tiny_verifier_untied: Path, tmp_path: Path) -> None:
    whole: dict[str, torch.Tensor] = {}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = tensors["lm_head.weight"].float()
        scale = torch.linspace(0.5, 2.0, -(-len(weight) // 128))[:, None]
        wide = scale.repeat_interleave(128, 0)[: len(weight)]
        tensors["lm_head.weight"] = (weight / wide).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale_inv"] = scale
        whole["lm_head"] = (tensors["lm_head.weight"].float() * wide).to(torch.bfloat16)
        return tensors

    folder = _quantised(tiny_verifier_untied, tmp_path / "fp8", BLOCKS, change)
    write_head(VerifierSpec.open(folder), tmp_path / "head")
    assert torch.equal(read_head(tmp_path / "head").lm_head, whole["lm_head"])


def _refusal(source: Path, folder: Path, settings: dict[str, Any], change: Any) -> str:
    with pytest.raises(HarnessError) as caught:
        write_head(VerifierSpec.open(_quantised(source, folder, settings, change)), folder / "head")
    return str(caught.value)


def test_quantised_ways_that_are_refused(tiny_verifier_untied: Path, tmp_path: Path) -> None:
    def without_scale(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}

    def bytes_with_absmax(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        packed = {"lm_head.weight": torch.zeros(100, 1, dtype=torch.uint8)}
        return tensors | packed | {"lm_head.weight.absmax": torch.zeros(4)}

    def with_zero_points(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        words = pack(torch.zeros(*tensors.pop("lm_head.weight").shape, dtype=torch.int32))
        more = {"lm_head.weight_packed": words, "lm_head.weight_scale": torch.ones(len(words), 2)}
        return tensors | more | {"lm_head.weight_zero_point": torch.zeros(4, 2, dtype=torch.int32)}

    source = tiny_verifier_untied
    text = _refusal(source, tmp_path / "a", BLOCKS, without_scale)
    assert "fp8 without its scale" in text and "lm_head.weight_scale_inv" in text
    text = _refusal(source, tmp_path / "b", {"quant_method": "bitsandbytes"}, bytes_with_absmax)
    assert re.search(r"not understood here[\s\S]*torch.uint8", text)
    text = _refusal(source, tmp_path / "c", FOUR_BITS, with_zero_points)
    assert "further parts: weight_zero_point" in text
