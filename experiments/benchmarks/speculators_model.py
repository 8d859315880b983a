"""The model of the PyPI package `speculators` with a drafter's weights in it.

Imported in an environment that has that package and nothing of this project but this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

VERSION = "0.9.0"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LLAMA_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


def package_name(name: str) -> str:
    """The package's name of a drafter weight, which goes by its name in EAGLE checkpoints."""
    return name.replace("midlayer.", "layers.0.").replace("aux_norm.", "input_norm.")


def require_version() -> None:
    """Refuses to measure another version than the one that results are labelled with."""
    if version("speculators") != VERSION:
        raise SystemExit(f"speculators {VERSION} is needed, {version('speculators')} installed")


def build(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    embed_VH: Tensor,
    target_rows_DG: Tensor,
    target_norm_G: Tensor | None,
    ttt_steps: int,
) -> Any:
    """Its EAGLE-3 model in float32, attention by torch's scaled_dot_product_attention.

    Args:
        config: sizes and switches under the names of this project's drafter config.
        weights: the drafter's state, `d2t` and `t2d` in it. Optional norms that the switches
            leave out are ignored.
        target_rows_DG: the verifier's head rows of the draft vocabulary.
        target_norm_G: the verifier's last norm; None where the states are from after it.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    llama = LlamaConfig(
        **{name: config[name] for name in LLAMA_SIZES},
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        pad_token_id=None,
    )
    llama._attn_implementation = "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=llama,
            draft_vocab_size=config["draft_vocab_size"],
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **{name: config.get(name, False) for name in SWITCHES},
        )
    )
    state = {package_name(name): value for name, value in weights.items()}
    state = {name: value for name, value in state.items() if name in model.state_dict()}
    state |= {
        "embed_tokens.weight": embed_VH,
        "verifier_lm_head.weight": target_rows_DG,
        "verifier_norm.weight": torch.ones(config["target_hidden_size"]),
    }
    if target_norm_G is not None:
        state["verifier_norm.weight"] = target_norm_G
    model.load_state_dict(state, strict=True)
    if target_norm_G is None:
        model.verifier_norm = torch.nn.Identity()
    return model.float().train()
