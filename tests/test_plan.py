"""`eagle3 plan`: what it counts for Kimi-K2.5, by hand; what it warns of and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.codec import stored
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import HarnessError
from eagle3.planning import GIB, Shape, estimate, trained_parameters, warnings
from experiments import plan_command
from experiments.settings_check import check_settings
from stages.params import overlaid, read_params, read_yaml
from tests.families import make_family


@pytest.fixture
def kimi(project_root: Path) -> dict[str, Any]:
    """params.yaml with Kimi-K2.5's settings over it."""
    overlay = read_yaml(project_root / "experiments" / "kimi_k25.yaml")
    return overlaid(read_params(project_root / "params.yaml"), overlay, where=Path("kimi"))


def stated_shape(params: dict[str, Any]) -> Shape:
    return Shape.model_validate(params["plan"]["shape"])


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


def test_settings_for_kimi_pass_every_check(kimi: dict[str, Any]) -> None:
    check_settings(kimi, "kimi")


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


def test_warnings_of_a_plan(project_root: Path, kimi: dict[str, Any]) -> None:
    lines = plan_command.describe(kimi, project_root, "kimi")
    assert not any("layer_init" in line or "rope_theta" in line for line in lines)
    kimi["train"]["drafter"] |= {"layer_init": "verifier", "rope_theta": None}
    kimi["train"]["max_length"] = 1024
    text = "\n".join(plan_command.describe(kimi, project_root, "kimi"))
    assert "WARNING: train.drafter.layer_init: verifier will be refused" in text
    assert "WARNING: train.drafter.rope_theta: null" in text
    assert "WARNING: documents are cut: 1,730 tokens on average, train.max_length 1,024" in text


def test_prompts_and_evaluation_in_a_plan(project_root: Path, kimi: dict[str, Any]) -> None:
    kimi["plan"] |= {"test_prompts": None, "decode_tokens_per_s": None}
    kimi["prompts"]["source"] = None
    text = "\n".join(plan_command.describe(kimi, project_root, "kimi"))
    assert "  prompts: 0.16\n" in text  # 10,000 of 230 tokens, at 4,000 a second
    assert "  responses: 1.04 (" in text
    assert (
        "evaluation and test responses: not counted, plan.test_prompts and "
        "plan.decode_tokens_per_s not stated" in text
    )
    kimi["plan"] |= {"test_prompts": 36000, "decode_tokens_per_s": 4096 / 3600}
    hours = estimate(plan_command.task_of(kimi, stated_shape(kimi), "kimi")).hours
    assert hours["responses"] == pytest.approx((15e6 + 36000 * 1500) / 4000 / 3600)
    assert hours["hidden states"] == pytest.approx((17.3e6 + 36000 * 1730) / 12000 / 3600)
    # An hour of decoding: 16 prompts x 64 tokens, four times.
    assert hours["evaluation, each arm"] == pytest.approx(1 + 36000 * 1730 / 15000 / 3600)


def test_how_many_prompts_a_plan_counts(kimi: dict[str, Any], tmp_path: Path) -> None:
    kimi["prompts"] |= {"source": "mine.jsonl", "count": None}

    def samples() -> int:
        return plan_command.task_of(kimi, stated_shape(kimi), "kimi", tmp_path).samples

    with pytest.raises(HarnessError, match=r"prompts is unknown[\s\S]*state prompts.count"):
        samples()
    line = json.dumps({"messages": [{"role": "user", "content": "Why?"}]})
    (tmp_path / "mine.jsonl").write_text(f"{line}\n\n{line}\n{line}\n")
    assert samples() == 3
    kimi["prompts"]["count"] = 2
    assert samples() == 2


def test_disk_and_memory_that_do_not_do(kimi: dict[str, Any]) -> None:
    task = plan_command.task_of(kimi, stated_shape(kimi), "kimi")
    found = estimate(task)
    said = warnings(task, found, free=600.0 * GIB, device_memory=10.0 * GIB, stored="bfloat16")
    assert "929 GiB needed as bfloat16, 600 GiB free; fits as fp8" in said[1]
    wide = warnings(task, found, free=1000.0 * GIB, device_memory=None, stored="float32")
    assert "1,852 GiB needed as float32, 1,000 GiB free; fits as bfloat16, fp8" in wide[1]
    assert said[2].startswith("training needs 19.9 GiB, the device has 10.0: lower")
    enough = warnings(task, found, free=2e15, device_memory=1e15, stored="bfloat16")
    assert [line.split()[0] for line in enough] == ["10,000"]


def test_a_verifier_of_unknown_shape(
    project_root: Path, kimi: dict[str, Any], tmp_path: Path
) -> None:
    kimi["plan"]["shape"] = None
    with pytest.raises(HarnessError, match=r"not on this machine[\s\S]*plan.shape[\s\S]*Kimi-K2.5"):
        plan_command.describe(kimi, project_root, "kimi")
    default = read_params(project_root / "params.yaml")
    with pytest.raises(HarnessError, match=r"plan\.shape, or run `dvc repro verifier` first"):
        plan_command.describe(default, tmp_path, "params.yaml")


def test_a_stated_shape_that_is_not_the_verifiers(
    project_root: Path, kimi: dict[str, Any], tmp_path: Path
) -> None:
    make_family("kimi_k25", tmp_path)
    kimi["verifier"]["source"] = str(tmp_path)
    with pytest.raises(HarnessError, match=r"not the verifier's[\s\S]*hidden_size: 64[\s\S]*7168"):
        plan_command.describe(kimi, project_root, "kimi")


def test_a_plan_counts_the_bytes_that_are_written(kimi: dict[str, Any]) -> None:
    task = plan_command.task_of(kimi, stated_shape(kimi), "kimi")
    small = task.verifier.model_copy(update={"hidden_size": 24})
    planned = estimate(replace(task, verifier=small, aux_layers=3)).token_bytes
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("fp8", None)):
        states = torch.randn(1, 4, 24).to(dtype or torch.bfloat16)
        rows = {
            "token_ids": torch.zeros(1, dtype=torch.int32), "loss_mask": torch.ones(1).byte(),
            "aux": states[:, :3], "final": states[:, 3], "verifier_lse": torch.zeros(1),
            "verifier_top1": torch.zeros(1, dtype=torch.int32),
        }  # fmt: skip
        written = stored(rows, "fp8" if dtype is None else "none")
        assert sum(tensor.nbytes for tensor in written.values()) == planned[name]
    wide = estimate(task)
    assert wide.token_bytes["fp8"] / wide.token_bytes["bfloat16"] == pytest.approx(0.5, abs=5e-4)
