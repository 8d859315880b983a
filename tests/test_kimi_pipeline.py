"""The whole pipeline on a tiny random verifier built as Kimi-K2.5 is.

Nested configuration, latent attention, experts, scaled RoPE, a vision part, published key names.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.chat import encode_prompt
from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from eagle3.generation import Request, generate, load_for_generation
from eagle3.sampling import Sampling
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import decoder_of, load_model, load_tokenizer
from stages.runner import run_stage
from tests.families import make_family
from tests.settings_of import write_settings
from tests.test_pipeline import tiny_settings
from tests.test_verifier_families import FOUR_BITS, pack

LAYERS = [1, 2, 3]  # SGLang cannot be told the output of layer 0 for this class


def stage(name: str, *argv: str) -> None:
    module = importlib.import_module(f"stages.{name}")
    run_stage(name, module.main, module.add_arguments, list(argv))


@pytest.fixture
def project(
    tmp_path: Path, project_root: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    changes: dict[str, Any] = tiny_settings(tmp_path)
    changes["run"] = {"threads": int(os.environ["OMP_NUM_THREADS"])}
    # In bfloat16 a router's near-tie goes one way alone and another in a batch.
    changes["extract"] = {"aux_layers": LAYERS, "dtype": "float32"}
    changes["train"] |= {"drafter": {"layer_init": "random", "rope_theta": 10000.0}}
    changes["arms"] = dict.fromkeys(("base", "scratch_large")) | {
        "scratch": {"tokens": 1500},
        "finetune": {"init": "checkpoints/scratch", "tokens": 1500},
    }
    write_settings(tmp_path, project_root, changes)
    lines = [{"messages": [{"role": "user", "content": f"Question {n}?"}]} for n in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("mt_bench", "human_eval"):
        tests = [{"text": f"{name} {n}"} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tests))
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_from_prompts_to_acceptance(project: Path) -> None:
    model = make_family("kimi_k25", project / "verifier")
    verifier = ["--verifier", "data/verifier"]
    stage("verifier", "--out", "data/verifier", "--head", "data/verifier_head.safetensors")
    stage("prompts", *verifier, "--out", "data/prompts")
    stage("regenerate", *verifier, "--prompts", "data/prompts", "--section", "regenerate",
          "--out", "data/responses")  # fmt: skip
    stage("extract", *verifier, "--responses", "data/responses", "--out", "data/hidden_states")
    states = StatesDataset.open(Path("data/hidden_states/test"), verify=True)
    assert states.meta.aux_layers == LAYERS
    one = states[0]
    with torch.no_grad():
        # The text decoder: the whole model takes two ids for places of images, and these answers
        # are random.
        decoder = decoder_of(model)
        whole = decoder(one.token_ids[None].long(), output_hidden_states=True)
    for column, layer in enumerate(LAYERS):
        expected = whole.hidden_states[layer + 1][0]
        torch.testing.assert_close(one.aux[:, column], expected, rtol=1e-3, atol=1e-3)
    stage("vocab", *verifier, "--responses", "data/responses", "--out", "data/vocab.safetensors",
          "--metrics", "metrics/vocab.json")  # fmt: skip
    stage("parity", "--states", "data/hidden_states", "--verifiers", "data/verifier",
          "--heads", "data/verifier_head.safetensors", "--out", "metrics/parity.json")  # fmt: skip
    for arm in ("scratch", "finetune"):
        stage("train", "--arm", arm, "--out", f"checkpoints/{arm}",
              "--curve", f"metrics/{arm}.curve.jsonl",
              "--parity", "metrics/parity.json")  # fmt: skip
        stage("export", "--checkpoint", f"checkpoints/{arm}", "--head",
              "data/verifier_head.safetensors", "--out", f"checkpoints/export/{arm}")  # fmt: skip
        stage("evaluate", "--arm", arm, "--checkpoint", f"checkpoints/{arm}", *verifier,
              "--head", "data/verifier_head.safetensors", "--states", "data/hidden_states/test",
              "--summary", f"metrics/{arm}.json", "--prompts", f"metrics/{arm}.jsonl",
              "--timing", f"metrics/{arm}.timing.json",
              "--texts", f"metrics/{arm}.texts.jsonl")  # fmt: skip
        summary = json.loads(Path(f"metrics/{arm}.json").read_text())
        assert 1.0 <= summary["all"]["tau"] <= 4.0
        # Real decoding with drafts writes what decoding without them does.
        exactness = summary["decode"]["exactness"]
        assert exactness["equal"] + len(exactness["near_ties"]) == exactness["prompts"] == 2
    exported = json.loads(Path("checkpoints/export/scratch/config.json").read_text())
    assert exported["rope_scaling"] is None and exported["aux_layers"] == LAYERS
    assert exported["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


@pytest.mark.parametrize("name", ["kimi_k25", "deepseek_v3", "qwen3_moe", "qwen3_vl", "gpt_oss",
                                  "gemma3"])  # fmt: skip
def test_batched_answers_are_the_models_own(name: str, tmp_path: Path) -> None:
    """Greedy, two slots for three prompts, against the model itself run token by token."""
    model = make_family(name, tmp_path)
    spec = VerifierSpec.open(tmp_path)
    tokenizer = load_tokenizer(spec)
    requests = [
        Request(text, tuple(encode_prompt(tokenizer, [{"role": "user", "content": text}])), 10)
        for text in ("One?", "Two or three?", "4")
    ]
    loaded = load_for_generation(spec, torch.float32, "cpu")
    done = generate(loaded, spec, requests, Sampling(temperature=0.0), seed=0, slots=2)
    answers = {completion.id: completion.response for completion in done}
    for request in requests:
        ids = list(request.prompt)
        for token in answers[request.id]:
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert int(logits.argmax()) == token
            ids.append(token)


# --- experts in four bits ---------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Kimi-K2.5's way: experts packed to four bits in groups, all else plain; settings nested.

    Returns also the experts' weights that the packed ones stand for.
    """
    folder = tmp_path / "packed"
    make_family("kimi_k25", folder)
    tensors = load_file(folder / "model.safetensors")
    whole: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if ".mlp.experts." in n]:
        weight = tensors.pop(name).float()
        scale = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7).to(torch.bfloat16)
        wide = scale.float().repeat_interleave(32, 1)
        values = (weight / wide).round().clamp(-8, 7).int()
        whole[name] = (values * wide).to(torch.bfloat16).float()  # the precision of the scales
        stem = name.removesuffix("weight")
        tensors |= {
            stem + "weight_packed": pack(values),
            stem + "weight_scale": scale,
            stem + "weight_shape": torch.tensor(weight.shape),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    plain = ["re:.*lm_head.*", "re:.*self_attn.*", "re:.*shared_experts.*"]
    plain += [r"re:.*mlp\.(gate|up|down).*", "re:.*vision_tower.*", "re:.*mm_projector.*"]
    config["text_config"]["quantization_config"] = FOUR_BITS | {"ignore": plain}
    path.write_text(json.dumps(config))
    return folder, whole


def test_settings_of_quantisation_are_found_where_they_are_nested(
    packed: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    spec = VerifierSpec.open(packed[0])
    assert spec.quantisation["format"] == "pack-quantized"
    name = "language_model.model.layers.1.mlp.experts.0.up_proj.weight"
    assert torch.equal(spec.tensors([name])[name], packed[1][name].to(torch.bfloat16))


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is not None, reason="the package is installed"
)
def test_loading_four_bits_names_the_package(packed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(HarnessError, match=r"not installed[\s\S]*compressed-tensors"):
        load_model(VerifierSpec.open(packed[0]), torch.float32, "cpu")


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
def test_four_bit_experts_compute_as_their_values(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, whole = packed
    plain = tmp_path / "plain"
    make_family("kimi_k25", plain)
    tensors = load_file(plain / "model.safetensors") | whole
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    models = [load_model(VerifierSpec.open(f), torch.float32, "cpu") for f in (folder, plain)]
    ours, expected = (dict(model.named_parameters()) for model in models)
    experts = [name for name in expected if ".mlp.experts." in name]
    assert len(experts) == 8  # two tensors in each of four layers
    assert all(torch.equal(ours[name].float(), expected[name]) for name in experts)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        answers = [model(ids, use_cache=False).logits for model in models]
    # Experts compute in bfloat16 there, the precision of their scales.
    torch.testing.assert_close(*answers, rtol=0.02, atol=0.2)
