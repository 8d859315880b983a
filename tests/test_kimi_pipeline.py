"""The whole pipeline on a tiny random verifier built as Kimi-K2.5 is, and what planning it says.

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
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import HarnessError
from eagle3.generation import Request, generate, load_for_generation
from eagle3.planning import GIB, Shape, estimate, trained_parameters, warnings
from eagle3.sampling import Sampling
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import decoder_of, load_model, load_tokenizer
from experiments import plan_command
from experiments.settings_check import check_settings
from stages.params import dump_yaml, overlaid, read_params, read_yaml
from stages.runner import run_stage
from tests.families import make_family
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
    params = overlaid(read_params(project_root / "params.yaml"), changes, where=Path("tiny"))
    (tmp_path / "params.yaml").write_text(dump_yaml(params))
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
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


# --- the plan -------------------------------------------------------------------------------------


def test_the_plan_for_kimi(project_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command.run(project_root, project_root / "experiments" / "kimi_k25.yaml")
    text = capsys.readouterr().out
    assert (
        "outputs of decoder layers [2, 30, 58]; SGLang's ids [3, 31, 59], vLLM's [3, 31, 59]"
        in text
    )
    assert "10,000 samples, 17,300,000 tokens, 15,000,000 supervised" in text
    # Four states of 7168 in bfloat16, and 13 bytes of token, argmax, log-sum-exp and mask.
    assert "bfloat16: 57,357 bytes a token, 924.1 GiB" in text
    # One byte a number and four scales of four bytes.
    assert "fp8: 28,701 bytes a token, 462.4 GiB (extract.codec)" in text
    assert "training scratch: 0.93" in text  # 17.3M tokens less 3%, three times, at 15,000 a second
    assert "prompts: 0.00 (given, not written)" in text
    # 15M tokens of training answers and 244 of 1,500, at 4,000 a second.
    assert "responses: 1.07 (less those given with the prompts)" in text
    # 244 documents of 1,730 tokens at 15,000 a second; 16 x 64 tokens four times at 40 a second.
    assert "evaluation, each arm: 0.04" in text
    assert "WARNING: 10,000 samples are far fewer than the 300,000 to 1.4 million" in text


def test_settings_for_kimi_pass_every_check(project_root: Path) -> None:
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))
    check_settings(params, "kimi")


def _drafter(aux_layers: int) -> tuple[Drafter, Shape]:
    sizes = {"hidden_size": 16, "vocab_size": 30, "intermediate_size": 24, "head_dim": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = DrafterConfig(
        **sizes, target_hidden_size=16, draft_vocab_size=12, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=64, aux_layers=tuple(range(aux_layers)),
    )  # fmt: skip
    shape = Shape(**sizes, model_type="llama", num_hidden_layers=5)
    return Drafter(config, torch.zeros(30, 16)), shape


@pytest.mark.parametrize("aux_layers", [1, 3])
def test_counted_parameters_are_the_drafters(aux_layers: int) -> None:
    drafter, shape = _drafter(aux_layers)
    counted = sum(p.numel() for p in drafter.parameters()) - drafter.lm_head.weight.numel()
    assert trained_parameters(shape, 16, aux_layers) == counted


def test_warnings_of_a_plan(project_root: Path) -> None:
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))
    lines = plan_command.describe(params, project_root, "kimi")
    assert not any("layer_init" in line or "rope_theta" in line for line in lines)
    params["train"]["drafter"] |= {"layer_init": "verifier", "rope_theta": None}
    params["train"]["max_length"] = 1024
    text = "\n".join(plan_command.describe(params, project_root, "kimi"))
    assert "WARNING: train.drafter.layer_init: verifier will be refused" in text
    assert "WARNING: train.drafter.rope_theta: null" in text
    assert "WARNING: documents are cut: 1,730 tokens on average, train.max_length 1,024" in text


def stated_shape(params: dict[str, Any]) -> Shape:
    return Shape.model_validate(params["plan"]["shape"])


def test_prompts_and_evaluation_in_a_plan(project_root: Path) -> None:
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    overlay["plan"] |= {"test_prompts": None, "decode_tokens_per_s": None}
    overlay["prompts"]["source"] = None
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))
    text = "\n".join(plan_command.describe(params, project_root, "kimi"))
    assert "  prompts: 0.16\n" in text  # 10,000 of 230 tokens, at 4,000 a second
    assert "  responses: 1.04 (" in text
    assert (
        "evaluation and test responses: not counted, plan.test_prompts and "
        "plan.decode_tokens_per_s not stated" in text
    )
    params["plan"] |= {"test_prompts": 36000, "decode_tokens_per_s": 4096 / 3600}
    hours = estimate(plan_command.task_of(params, stated_shape(params), "kimi")).hours
    assert hours["responses"] == pytest.approx((15e6 + 36000 * 1500) / 4000 / 3600)
    assert hours["hidden states"] == pytest.approx((17.3e6 + 36000 * 1730) / 12000 / 3600)
    # An hour of decoding: 16 prompts x 64 tokens, four times.
    assert hours["evaluation, each arm"] == pytest.approx(1 + 36000 * 1730 / 15000 / 3600)


def test_how_many_prompts_a_plan_counts(project_root: Path, tmp_path: Path) -> None:
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    overlay["prompts"] |= {"source": "mine.jsonl", "count": None}
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))

    def samples() -> int:
        return plan_command.task_of(params, stated_shape(params), "kimi", tmp_path).samples

    with pytest.raises(HarnessError, match=r"prompts is unknown[\s\S]*state prompts.count"):
        samples()
    line = json.dumps({"messages": [{"role": "user", "content": "Why?"}]})
    (tmp_path / "mine.jsonl").write_text(f"{line}\n\n{line}\n{line}\n")
    assert samples() == 3
    params["prompts"]["count"] = 2
    assert samples() == 2


def test_disk_and_memory_that_do_not_do(project_root: Path) -> None:
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))
    task = plan_command.task_of(params, stated_shape(params), "kimi")
    found = estimate(task)
    said = warnings(task, found, free=600.0 * GIB, device_memory=10.0 * GIB, stored="bfloat16")
    assert "929 GiB needed as bfloat16, 600 GiB free; fits as fp8" in said[1]
    wide = warnings(task, found, free=1000.0 * GIB, device_memory=None, stored="float32")
    assert "1,852 GiB needed as float32, 1,000 GiB free; fits as bfloat16, fp8" in wide[1]
    assert said[2].startswith("training needs 19.9 GiB, the device has 10.0: lower")
    enough = warnings(task, found, free=2e15, device_memory=1e15, stored="bfloat16")
    assert [line.split()[0] for line in enough] == ["10,000"]


def test_a_verifier_of_unknown_shape(project_root: Path, tmp_path: Path) -> None:
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    overlay["plan"]["shape"] = None
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))
    with pytest.raises(HarnessError, match=r"not on this machine[\s\S]*plan.shape[\s\S]*Kimi-K2.5"):
        plan_command.describe(params, project_root, "kimi")
    default = read_params(project_root / "params.yaml")
    with pytest.raises(HarnessError, match=r"plan\.shape, or run `dvc repro verifier` first"):
        plan_command.describe(default, tmp_path, "params.yaml")


def test_a_stated_shape_that_is_not_the_verifiers(project_root: Path, tmp_path: Path) -> None:
    make_family("kimi_k25", tmp_path)
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    overlay["verifier"]["source"] = str(tmp_path)
    params = overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))
    with pytest.raises(HarnessError, match=r"not the verifier's[\s\S]*hidden_size: 64[\s\S]*7168"):
        plan_command.describe(params, project_root, "kimi")
