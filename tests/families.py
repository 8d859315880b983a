"""Tiny random verifiers of the families people serve, with their true structure and key names.

transformers builds the models and writes the names that published checkpoints have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_tiny_tokenizer

VOCAB = 512
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
# Latent attention, experts with a shared one, groups of experts, scaled RoPE: Kimi's proportions.
DEEPSEEK: dict[str, Any] = TEXT | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "aux_loss_alpha": 0.001,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
FAMILIES = (
    *("llama3", "qwen3", "qwen3_moe", "qwen3_vl", "gpt_oss", "gemma3", "gemma2"),
    *("deepseek_v3", "kimi_k2", "kimi_k25"),
)


def make_family(name: str, folder: Path, *, seed: int = 0) -> Any:
    """Writes a verifier of a family, float32, with a tokenizer; returns the model."""
    config, model_class = _family(name)
    make_tiny_tokenizer(folder, VOCAB)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for key, weight in model.named_parameters():
            if key.endswith("norm.weight"):  # not the ones they start as
                weight.data += 0.3 * torch.randn_like(weight)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    if name == "kimi_k25":
        _published_names(folder / "model.safetensors")
    path = folder / "config.json"
    written = json.loads(path.read_text())
    if name == "kimi_k2":  # published with a model type and code of its own
        written |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.X"}}
    if name == "kimi_k25":  # transformers' own names and omissions, as published instead
        written |= {"architectures": ["KimiK25ForConditionalGeneration"]}
        written |= {"media_placeholder_token_id": written["image_token_id"]}
        text = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
        written["text_config"] |= text | {"moe_layer_freq": 1}
        width = {"vt_hidden_size": VISION["hidden_size"], "text_hidden_size": TEXT["hidden_size"]}
        written["vision_config"] |= width
    path.write_text(json.dumps(written, indent=2))
    return model


def _published_names(path: Path) -> None:
    """Weights under the names that are published: transformers renames some more than it should."""
    changes = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    }
    tensors = load_file(path)
    for written, published in changes.items():
        tensors = {name.replace(written, published): one for name, one in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def _family(name: str) -> tuple[Any, Any]:
    import transformers as t

    if name == "llama3":
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
        rope |= {"rope_theta": 500000.0}
        return t.LlamaConfig(**TEXT, rope_parameters=rope), t.LlamaForCausalLM
    if name == "qwen3":
        return t.Qwen3Config(**TEXT, head_dim=32), t.Qwen3ForCausalLM
    if name == "qwen3_moe":
        return t.Qwen3MoeConfig(**TEXT, **MOE, head_dim=32), t.Qwen3MoeForCausalLM
    if name == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 5e6}
        text = TEXT | {"head_dim": 32, "rope_parameters": rope}
        vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2}
        vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
        vision |= {"deepstack_visual_indexes": [0]}
        config = t.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        return config, t.Qwen3VLForConditionalGeneration
    if name == "gpt_oss":
        extra = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        return t.GptOssConfig(**TEXT, **extra, sliding_window=8), t.GptOssForCausalLM
    if name == "gemma2":
        text = TEXT | {"tie_word_embeddings": True}
        config = t.Gemma2Config(**text, head_dim=32, query_pre_attn_scalar=32)
        config.final_logit_softcapping = 5.0
        return config, t.Gemma2ForCausalLM
    if name == "gemma3":
        text = TEXT | {"head_dim": 32, "sliding_window": 8, "tie_word_embeddings": True}
        vision = VISION | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        config = t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
        return config, t.Gemma3ForConditionalGeneration
    if name in ("deepseek_v3", "kimi_k2"):
        return t.DeepseekV3Config(**DEEPSEEK), t.DeepseekV3ForCausalLM
    vision = VISION | {"num_attention_heads": 2}
    config = t.Kimi_K25Config(
        text_config=DEEPSEEK | {"model_type": "kimi_k2"},
        vision_config=vision,
        projection_hidden_size=32,
        image_token_id=510,
        video_token_id=511,
        tie_word_embeddings=False,
    )
    return config, t.Kimi_K25ForConditionalGeneration
