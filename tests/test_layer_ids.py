"""Layer conventions, by value: hand-computed, and against what transformers itself returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.errors import HarnessError
from eagle3.layer_ids import (
    from_sglang,
    from_vllm,
    sglang_capture_ids,
    sglang_layer_ids,
    vllm_ids,
)


def test_the_ids_that_engines_want() -> None:
    smollm2, kimi = [1, 14, 26], [2, 30, 58]
    assert vllm_ids(smollm2) == [2, 15, 27]
    assert vllm_ids(kimi) == [3, 31, 59]
    assert sglang_layer_ids(smollm2, "llama") == smollm2
    assert sglang_layer_ids(kimi, "kimi_k25") == [3, 31, 59]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "kimi_k25", "deepseek_v3"])
@pytest.mark.parametrize("layers", [[1, 14, 26], [2, 30, 58], [5]])
def test_there_and_back(layers: list[int], model_type: str) -> None:
    assert from_vllm(vllm_ids(layers)) == layers
    assert from_sglang(sglang_layer_ids(layers, model_type), model_type) == layers
    ids = sglang_capture_ids(layers, model_type, 61)
    assert from_sglang(ids, model_type) == layers


def test_both_ways_to_say_the_same_to_deepseek() -> None:
    """SGLang's own example ids, [1, 29, 57], name the same states as [2, 30, 58]."""
    assert from_sglang([1, 29, 57], "deepseek_v3") == from_sglang([2, 30, 58], "deepseek_v3")
    assert from_sglang([2, 30, 58], "deepseek_v3") == [1, 29, 57]


def test_what_sglang_cannot_be_told() -> None:
    with pytest.raises(HarnessError, match="layer 0 first"):
        sglang_layer_ids([0, 30, 58], "deepseek_v3")
    # Capturing, any order will do, so that the first id is another one.
    assert sglang_capture_ids([0, 30, 58], "deepseek_v3", 61) == [59, 31, 1]
    assert from_sglang([59, 31, 1], "deepseek_v3") == [0, 30, 58]
    with pytest.raises(HarnessError, match="layer 0 first"):
        sglang_capture_ids([0], "deepseek_v3", 61)
    with pytest.raises(HarnessError, match="another order"):
        sglang_layer_ids([26, 14, 1], "llama")
    with pytest.raises(HarnessError, match=r"last layer[\s\S]*from 0 to 28"):
        sglang_capture_ids([1, 29], "llama", 30)


def test_ids_name_outputs_of_layers(tiny_verifier: Path) -> None:
    """What a hook on decoder layer k sees is `hidden_states` at the id that k is given."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    seen: dict[int, torch.Tensor] = {}
    for k in (0, 3):
        model.model.layers[k].register_forward_hook(
            lambda _, __, output, k=k: seen.__setitem__(
                k, output[0] if isinstance(output, tuple) else output
            )
        )
    with torch.no_grad():
        states = model.model(torch.arange(5, 25)[None], output_hidden_states=True).hidden_states
    for k, index in zip((0, 3), vllm_ids([0, 3]), strict=True):
        assert torch.equal(seen[k], states[index])
