"""The config.json of an EAGLE-3 drafter as SGLang and vLLM read it.

SGLang takes the layers from `eagle_config.eagle_aux_hidden_state_layer_ids`, in a convention that
depends on the verifier's class; vLLM takes the top-level key, which counts as transformers'
`hidden_states` do. So both are always written. What engines do not know (the layer's switches, the
verifier) stands beside, under keys of its own, so that nobody has to guess later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.drafter import DrafterConfig
from eagle3.errors import HarnessError
from eagle3.layer_ids import from_vllm, sglang_layer_ids, vllm_ids
from eagle3.settings import read_settings

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# At the top as vLLM counts, in eagle_config as SGLang does.
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SHARED = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "hidden_act",
)
# Of those, what a config may leave out; None: worked out from the others.
DEFAULTS: Mapping[str, Any] = {
    "target_hidden_size": None,
    "head_dim": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
}


def eagle_config(
    config: DrafterConfig, *, verifier: str, config_hash: str, model_type: str, dtype: str
) -> dict[str, Any]:
    """config.json of a drafter.

    Args:
        verifier, config_hash, model_type: of the verifier it was trained for.
        dtype: of the stored weights.
    """
    values = config.model_dump(mode="json")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: values[name] for name in SHARED},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **{name: values[name] for name in SWITCHES},
        LAYER_IDS: vllm_ids(config.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            LAYER_IDS: sglang_layer_ids(config.aux_layers, model_type),
        },
        "aux_layers": list(config.aux_layers),
        "verifier": {"name": verifier, "config_hash": config_hash, "model_type": model_type},
    }


def read_eagle_config(values: Mapping[str, Any], *, where: str) -> DrafterConfig:
    """The drafter that a config.json describes.

    Raises:
        HarnessError: keys missing, or no word about which layers its aux states come from.
    """
    named = next((n for n in ("aux_layers", LAYER_IDS) if values.get(n) is not None), None)
    if named is None:
        raise HarnessError(
            "the drafter does not say which layers its aux hidden states come from",
            where=where,
            rule=f"aux_layers (post-layer indices) or {LAYER_IDS}",
            got="neither key",
            fix="add aux_layers to its config.json, as it was trained",
        )
    layers = layer_list(values[named], where=f"{where}, {named}")
    aux_layers = tuple(from_vllm(layers) if named == LAYER_IDS else layers)
    missing = [name for name in SHARED if name not in values and name not in DEFAULTS]
    if missing:
        raise HarnessError(
            "the drafter's config lacks keys", where=where, rule=", ".join(missing),
            got=f"keys {', '.join(sorted(values))}",
            fix="add them to its config.json, as it was trained",
        )  # fmt: skip
    shared = {name: values.get(name, DEFAULTS.get(name)) for name in SHARED}
    if not shared["head_dim"]:
        sizes = {name: values[name] for name in ("hidden_size", "num_attention_heads")}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise HarnessError(
                    "the drafter's config cannot be used",
                    where=f"{where}, {name}",
                    rule="a whole number above 0",
                    got=repr(value),
                    fix="correct its config.json",
                )
        shared["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    shared["target_hidden_size"] = shared["target_hidden_size"] or shared["hidden_size"]
    switches = {name: values.get(name, False) for name in SWITCHES}
    return read_settings(
        DrafterConfig, {**shared, **switches, "aux_layers": aux_layers}, where=where
    )


def layer_list(value: object, *, where: str) -> list[int]:
    """Layer ids as a config holds them.

    Raises:
        HarnessError: anything but a list of whole numbers.
    """
    if isinstance(value, list) and value and all(type(layer) is int for layer in value):
        return value
    raise HarnessError(
        "the drafter's aux layers cannot be used",
        where=where,
        rule="a list of whole numbers, one or more",
        got=repr(value),
        fix="correct its config.json, as it was trained",
    )
