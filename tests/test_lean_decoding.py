"""The lean forward passes compute what transformers' models and the drafter itself do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from eagle3.cached_verifier import CachedVerifier
from eagle3.drafter import DraftCache, Drafter, DrafterConfig
from eagle3.errors import HarnessError
from eagle3.lean_drafter import LeanDrafter
from eagle3.lean_verifier import LeanVerifier, decoding_verifier, is_lean

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, every head its own keys": ("Llama", {"num_key_value_heads": 4}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3's rope": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


def make(family: str, **changes: Any) -> Any:
    """A random model in fp32; biases and norms random too, where libraries start them at 0 or 1."""
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = 0.3 * torch.randn_like(parameter)
                parameter.data = noise + (1.0 if name.endswith("weight") else 0.0)
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("pack", [False, True])
def test_verifier_equals_transformers(name: str, pack: bool) -> None:
    """A prompt, several rows, one row, a crop: logits and states of one uncached pass."""
    family, changes = KNOWN[name]
    model = make(family, **changes)
    ids = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(ids[None], output_hidden_states=True)
    verifier = decoding_verifier(copy.deepcopy(model), (0, 1), pack=pack)
    assert isinstance(verifier, LeanVerifier)
    parts = [verifier.forward(ids[:50], 50)]
    verifier.forward(ids[:5], 1)
    verifier.crop(50)
    for start, end in ((50, 54), (54, 55), (55, 60)):
        parts.append(verifier.forward(ids[start:end], end - start))
        assert verifier.length == end
    logits = torch.cat([part.logits_MV for part in parts])
    torch.testing.assert_close(logits, whole.logits[0], rtol=1e-4, atol=2e-4)
    aux = torch.cat([part.aux_NLH for part in parts])
    # The last layer's output is not among transformers' states: it gives the normed one there.
    expected = torch.stack([whole.hidden_states[layer + 1][0] for layer in (0, 1)], dim=1)
    torch.testing.assert_close(aux, expected, rtol=1e-4, atol=2e-4)


def test_bfloat16_is_as_near_to_float32_as_transformers() -> None:
    model = make("Llama")
    ids = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(2))
    rounded = copy.deepcopy(model).bfloat16()
    exact = copy.deepcopy(rounded).float()
    with torch.inference_mode():
        right = exact(ids[None]).logits[0]
        theirs = (rounded(ids[None]).logits[0].float() - right).std()
    verifier = LeanVerifier(rounded, (0,), pack=True)
    ours = (torch.cat([verifier.forward(part, 8).logits_MV for part in ids.split(8)]) - right).std()
    assert 0 < ours < 1.5 * theirs < 0.1 * right.std()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Llama", {"hidden_act": "gelu"}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("Gemma2", {}),
        ("Olmo2", {}),
    ],
)
def test_what_differs_is_left_to_transformers(family: str, changes: dict[str, Any]) -> None:
    model = make(family, **changes)
    assert not is_lean(model)
    assert isinstance(decoding_verifier(model, (0,), pack=False), CachedVerifier)


def test_derived_classes_and_other_linears_are_left_to_transformers() -> None:
    class Scaled(transformers.LlamaForCausalLM):
        pass

    class Adapted(torch.nn.Linear):
        pass

    assert not is_lean(Scaled(transformers.LlamaConfig(**SIZES)))
    model = make("Llama")
    assert is_lean(model)
    model.model.layers[1].mlp.up_proj = Adapted(64, 96, bias=False)
    assert not is_lean(model)


def test_a_layer_that_does_not_exist_leaves_the_model_whole() -> None:
    model = make("Llama")
    with pytest.raises(HarnessError, match="does not have"):
        LeanVerifier(model, (0, 3), pack=False)
    assert is_lean(model)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"norm_before_fc": True},
        {"fc_norm": True, "num_key_value_heads": 4},
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_drafter_equals_its_own_forward(switches: dict[str, Any], pack: bool) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "target_hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "draft_vocab_size": 64,
        "aux_layers": (0, 1, 2),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
    }
    rng = torch.Generator().manual_seed(3)
    drafter = Drafter(
        DrafterConfig(**(sizes | switches)), torch.randn(128, 64, generator=rng)
    ).eval()
    for parameter in drafter.requires_grad_(False).parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng) + (parameter.ndim == 1))
    drafter.d2t += torch.arange(64)
    lean = LeanDrafter(drafter, pack=pack)
    ids = torch.randint(0, 128, (30,), generator=rng)
    aux = torch.randn(30, 3, 48, generator=rng)
    theirs, ours = DraftCache(), DraftCache()
    with torch.inference_mode():
        for start, end in ((0, 20), (20, 24), (24, 25), (25, 30)):
            rows, tokens = torch.arange(start, end), ids[start:end]
            expected = drafter.forward_cached(tokens, drafter.fuse(aux[start:end]), rows, theirs)
            got = lean.forward_cached(tokens, lean.fuse(aux[start:end]), rows, ours)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                lean.logits(got), drafter.logits(expected), rtol=1e-4, atol=1e-4
            )
        again = lean.forward_cached(ids[:1], got[-1:], torch.tensor([30]), ours)
        there = drafter.forward_cached(ids[:1], expected[-1:], torch.tensor([30]), theirs)
        torch.testing.assert_close(again, there, rtol=1e-4, atol=1e-4)
    assert torch.equal(lean.target_ids(torch.arange(64)), 2 * torch.arange(64))
