"""A verifier's config.json, nested or flat, as the few values that the harness needs.

The only place that unwraps nested configurations. What a configuration leaves out is filled in by
transformers' class for its model type, as it would be for the loaded model. Opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eagle3.errors import HarnessError
from eagle3.workspace import digest

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
# Families whose RMSNorm multiplies by (1 + w), and those that scale embeddings by sqrt(H).
OFFSET_NORMS = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
SQRT_EMBEDDINGS = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
    *("recurrent_gemma", "vaultgemma"),
)
SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"),
    *("num_attention_heads", "max_position_embeddings"),
)
SCALES = (
    *("logit_scale", "lm_head_multiplier", "logits_scaling", "embedding_multiplier"),
    *("rms_norm_eps", "layer_norm_eps"),
)
QUANTISED = ("quantization_config", "compression_config")
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
# All that is read of a language model's part: two parts that differ in any of it are two verifiers.
READ = (
    *SIZES,
    *SCALES,
    *QUANTISED,
    *("model_type", "num_key_value_heads", "head_dim", "v_head_dim", "kv_lora_rank"),
    *("hidden_act", "hidden_activation", "rope_parameters", "rope_scaling", "rope_theta"),
    *("bos_token_id", "eos_token_id", "final_logit_softcapping", "tie_word_embeddings"),
)


def text_config(
    config: Mapping[str, Any], *, where: object = "the verifier's config.json"
) -> Mapping[str, Any]:
    """The language model's own part, however deep it lies.

    Several such parts stand for one verifier if they agree in what is read; one without a size of
    a decoder is passed over beside one that has some.

    Raises:
        HarnessError: several parts differ, and nothing says which is the language model's.
    """
    parts = _text_parts(config, "")
    sized = {name: part for name, part in parts.items() if any(map(part.get, SIZES))} or parts
    first, *others = sized.values()
    apart = [key for key in READ if any(other.get(key) != first.get(key) for other in others)]
    if apart:
        shown = apart[:6]
        raise HarnessError(
            "a verifier's configuration has more than one part for the language model",
            where=where,
            rule=f"one part, or parts that agree in {', '.join(apart)}",
            got="; ".join(
                f"{name}: {', '.join(f'{key} {part.get(key)!r}' for key in shown)}"
                for name, part in sized.items()
            ),
            fix="take the part that is not the language model's out of a copy of config.json",
        )
    return first


def _text_parts(config: Mapping[str, Any], path: str) -> dict[str, Mapping[str, Any]]:
    """The innermost parts by where they stand, as `thinker_config.text_config`."""
    parts: dict[str, Mapping[str, Any]] = {}
    for name in NESTED:
        if isinstance(config.get(name), Mapping):
            parts |= _text_parts(config[name], f"{path}.{name}" if path else name)
    return parts or {path: config}


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the checkpoint's weights are quantised: beside the language model's values or above."""
    for holder in (config, text_config(config)):
        for name in QUANTISED:
            if isinstance(holder.get(name), Mapping):
                return holder[name]
    return {}


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """What a configuration says of tied embeddings, if anything."""
    return text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Whether keys and values are kept as one latent vector a token: MLA, DeepSeek-V2 section 2.1
    (arXiv:2405.04434), which Kimi-K2 took over."""
    return text_config(config).get("kv_lora_rank") is not None


def flat_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, where: object
) -> dict[str, Any]:
    """config.json and generation_config.json as the fields of `HeadConfig`, all but `verifier`.

    Raises:
        HarnessError: a size is missing or no whole number, or two parts of the configuration could
            be the language model's.
    """
    text = _complete(text_config(config, where=where))
    sizes = {name: _size(text, name, where) for name in SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    # Latent attention (DeepSeek): the size that a plain attention of the same shape would have.
    head_dim = text.get("v_head_dim") if "kv_lora_rank" in text else text.get("head_dim")
    rope = _rope(text, where)
    theta = rope.pop("rope_theta", None) or text.get("rope_theta") or 10000.0
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    kind = str(text.get("model_type") or config.get("model_type") or "")
    if not kind:
        raise _lacks("model_type", text, where)
    eos: list[int] = []
    for holder in (text, config, generation):
        value = holder.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int for one in ids):
            raise _unusable("eos_token_id", "a token id, or a list of them", value, where)
        eos += ids
    embed_scale = math.sqrt(hidden) if kind in SQRT_EMBEDDINGS else 1.0
    # None and 0 of these stand for "not scaled".
    numbers = {name: _number(text, name, where) for name in SCALES if text.get(name)}
    logit_scale = numbers.get("logit_scale") or numbers.get("lm_head_multiplier") or 1.0
    if scaling := numbers.get("logits_scaling"):  # Granite divides, HyperCLOVA X multiplies
        logit_scale = scaling if kind.startswith("hyperclovax") else 1.0 / scaling
    softcap = text.get("final_logit_softcapping")
    if softcap is not None and _number(text, "final_logit_softcapping", where) <= 0:
        raise _unusable("final_logit_softcapping", "above 0, or null", softcap, where)
    return sizes | {
        "config_hash": digest({k: v for k, v in config.items() if k not in VOLATILE})[:16],
        "model_type": kind,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": head_dim or hidden // heads,
        "hidden_act": text.get("hidden_act") or text.get("hidden_activation") or "silu",
        "rms_norm_eps": numbers.get("rms_norm_eps") or numbers.get("layer_norm_eps") or 1e-6,
        "rope_theta": _number({"rope_theta": theta}, "rope_theta", where),
        "rope_scaling": None if plain else rope,
        "bos_token_id": text.get("bos_token_id", config.get("bos_token_id")),
        "eos_token_ids": sorted(set(eos)),
        "norm_offset": 1.0 if kind in OFFSET_NORMS else 0.0,
        "embed_scale": numbers.get("embedding_multiplier") or embed_scale,
        "logit_scale": logit_scale,
        "logit_softcap": None if softcap is None else float(softcap),
    }


def _lacks(name: str, text: Mapping[str, Any], where: object) -> HarnessError:
    return HarnessError(
        "the verifier's configuration lacks a key",
        where=where,
        rule=name,
        got=_keys(text),
        fix="give the verifier's whole folder, or add the key to its config.json",
    )


def _size(text: Mapping[str, Any], name: str, where: object) -> int:
    value = text.get(name)
    if value is None:
        raise _lacks(name, text, where)
    if type(value) is not int or value < 1:
        raise _unusable(name, "a whole number above 0", value, where)
    return value


def _number(text: Mapping[str, Any], name: str, where: object) -> float:
    value = text[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _unusable(name, "a number", value, where)
    return float(value)


def _rope(text: Mapping[str, Any], where: object) -> dict[str, Any]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if isinstance(rope, Mapping) and "full_attention" in rope:  # one entry for each kind of layer
        rope = rope["full_attention"]
    if not isinstance(rope, Mapping):
        raise _unusable("rope_parameters or rope_scaling", "an object with keys", rope, where)
    return dict(rope)


def _keys(text: Mapping[str, Any]) -> str:
    return f"keys {', '.join(sorted(text)[:12])}" if text else "no keys"


def _unusable(name: str, rule: str, value: object, where: object) -> HarnessError:
    return HarnessError(
        "the verifier's configuration cannot be used",
        where=f"{where}, {name}",
        rule=rule,
        got=repr(value),
        fix="correct its config.json (or generation_config.json), or download the verifier again",
    )


def _complete(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with the defaults of its model type where it leaves something out.

    Published Gemma 3 folders, for one, name neither their vocabulary nor their head size.
    """
    if all(text.get(name) is not None for name in (*SIZES, "head_dim")) or "kv_lora_rank" in text:
        return text
    from transformers import CONFIG_MAPPING

    kind = str(text.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return text
    try:
        known = CONFIG_MAPPING[kind](**text).to_dict()
    except Exception:  # a value of a kind that transformers refuses: ours to name, by key
        return text
    return {**_given(known), **_given(text)}


def _given(text: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in text.items() if value is not None}
