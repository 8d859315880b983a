"""Writes an EAGLE-3 drafter's config.json and tensor names as the package speculators has them.

vLLM reads this format beside EAGLE's own. What a reader would otherwise have to guess is always
written: the layers' ids (as transformers counts `hidden_states`), the layer's switches (vLLM takes
a missing `norm_before_residual` for true), RoPE, and the number of aux states, which vLLM takes for
3 unless told. Knows no files; `eagle3.formats.published` reads this format.

Legend: V vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eagle3.drafter import DrafterConfig
from eagle3.formats.eagle import LAYER_IDS, SWITCHES
from eagle3.formats.published import SPECULATORS
from eagle3.formats.published_tensors import EMBEDDING, MAPS, PREFIXES
from eagle3.layer_ids import vllm_ids

VERSION = "0.9.0"  # of the package whose layout this is


def speculators_config(
    config: DrafterConfig,
    *,
    verifier: str,
    config_hash: str,
    model_type: str,
    dtype: str,
    drafts: int,
    source: str | None,
    architectures: list[str],
) -> dict[str, Any]:
    """config.json of a drafter.

    Args:
        verifier, config_hash, model_type: of the verifier it was trained for.
        dtype: of the stored weights.
        drafts: tokens a verification step proposes where nobody says otherwise.
        source: hub id or folder of the verifier, which `vllm serve DRAFTER` opens; None where it
            has none that others could open.
        architectures: of the verifier, as its config.json names them.
    """
    values = config.model_dump(mode="json")
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    layer = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act"),
    )
    return {
        "architectures": ["Eagle3DraftModel"],
        SPECULATORS: "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": source, "architectures": architectures},
        },
        "transformer_layer_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **{name: values[name] for name in layer},
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "num_aux_hidden_states": len(config.aux_layers),
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{name: values[name] for name in SWITCHES},
        "embed_requires_grad": False,
        LAYER_IDS: vllm_ids(config.aux_layers),
        "torch_dtype": dtype,
        "aux_layers": list(config.aux_layers),
        "verifier": {"name": verifier, "config_hash": config_hash, "model_type": model_type},
    }


def to_speculators(
    tensors: Mapping[str, Tensor], config: DrafterConfig, embed_VH: Tensor
) -> dict[str, Tensor]:
    """A drafter's tensors under speculators' names, the embedding it reads among them.

    A full vocabulary has no maps: readers have no place for them.
    """
    full = config.draft_vocab_size == config.vocab_size
    named = {EMBEDDING: embed_VH}
    for name, value in tensors.items():
        for ours, theirs in PREFIXES.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        named[name] = value
    return {name: value for name, value in named.items() if not (full and name in MAPS)}
