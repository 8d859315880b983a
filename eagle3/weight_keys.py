"""Which stored tensor is a verifier's embedding, final norm, lm_head and last decoder layer.

Works on names alone: it opens no tensor and knows no configuration beyond the number of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eagle3.errors import HarnessError

EXACT = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
# Nested verifiers put something before or into the flat name. Tried in this order; vision towers
# have embeddings and norms of their own, so a suffix never is as short as "norm.weight".
SUFFIXES = {
    "embed": ("model.embed_tokens.weight", "language_model.embed_tokens.weight"),
    "norm": ("model.norm.weight", "language_model.norm.weight"),
    "lm_head": ("language_model.lm_head.weight", "lm_head.weight"),
}
# Names of other formats (Mistral's own).
ALIASES = {
    "embed": ("tok_embeddings.weight", "embed_tokens.weight"),
    "norm": ("norm.weight",),
    "lm_head": ("output.weight",),
}
# What stands in a quantised checkpoint for `x.weight`, or beside it.
PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "weight.absmax", "weight_global_scale"),
)
# A norm of the last layer by which it is no Llama layer: these norms stand around the block.
SANDWICHED = "pre_feedforward_layernorm.weight"
LLAMA_LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@dataclass(frozen=True)
class WeightKeys:
    """Names of stored tensors.

    Attributes:
        embed, norm: always there.
        lm_head: None where the output shares the embedding.
        layer: name inside the last decoder layer -> stored name, or None when that layer does not
            have the nine matrices and norms of a Llama layer (experts, latent attention), or has
            norms of its own around them (Gemma).
    """

    embed: str
    norm: str
    lm_head: str | None
    layer: Mapping[str, str] | None


def logical_name(stored: str) -> str:
    """`x.weight` for `x.weight_packed`, any other name as it is."""
    return stored.removesuffix("_packed") if stored.endswith(".weight_packed") else stored


def stored_parts(names: Collection[str], name: str) -> dict[str, str]:
    """The stored tensors that make up the weight `name`, by their last part."""
    stem = name.removesuffix("weight")
    return {part: stem + part for part in PARTS if stem + part in names}


def find_key(names: Collection[str], role: str, *, where: object) -> str | None:
    """The stored name that plays `role` ("embed", "norm" or "lm_head"), or None.

    The exact name wins, then a suffix, then an alias.

    Raises:
        HarnessError: two names fit equally well.
    """
    if EXACT[role] in names:
        return EXACT[role]
    for suffix in SUFFIXES[role]:
        fitting = sorted(name for name in names if name.endswith("." + suffix) or name == suffix)
        if len(fitting) > 1:
            raise _ambiguous(role, f"one name ending in {suffix}", fitting, where)
        if fitting:
            return fitting[0]
    known = [alias for alias in ALIASES[role] if alias in names]
    if len(known) > 1:
        raise _ambiguous(role, f"one of {' and '.join(ALIASES[role])}", known, where)
    return known[0] if known else None


def _ambiguous(role: str, rule: str, fitting: Sequence[str], where: object) -> HarnessError:
    return HarnessError(
        f"two stored tensors could be the verifier's {role}",
        where=where,
        rule=rule,
        got=", ".join(fitting),
        fix="keep the language model's one in the weight index",
    )


def find_keys(
    names: Collection[str], num_hidden_layers: int, *, tied: bool | None, where: object
) -> WeightKeys:
    """Resolves all names of a head.

    Args:
        names: every tensor name in the weight index or file.
        num_hidden_layers: to name the last decoder layer.
        tied: what the configuration says of tied embeddings; None where it says nothing.
        where: for the error.

    Raises:
        HarnessError: a name is missing or ambiguous.
    """
    names = {logical_name(name) for name in names}
    found = {role: find_key(names, role, where=where) for role in EXACT}
    for role in ("embed", "norm"):
        if found[role] is None:
            raise HarnessError(
                f"the verifier's {role} weight was not found",
                where=where,
                rule=f"{EXACT[role]}, a name ending in it, or {' or '.join(ALIASES[role])}",
                got=f"{len(names)} names, such as {', '.join(sorted(names)[:3])}",
                fix="save the whole model with save_pretrained, under transformers' names",
            )
    embed, norm = str(found["embed"]), str(found["norm"])
    if found["lm_head"] is None and tied is False:
        raise HarnessError(
            "the verifier's lm_head weight was not found, and it does not share the embedding",
            where=where,
            rule=f"{EXACT['lm_head']}, or tie_word_embeddings: true in config.json",
            got=f"{len(names)} names, none of an output matrix",
            fix="download or save the verifier again, whole; or set the key, if it is true",
        )
    prefix = embed.removesuffix("embed_tokens.weight") + f"layers.{num_hidden_layers - 1}."
    layer = {name: prefix + name for name in LLAMA_LAYER}
    complete = all(name in names for name in layer.values()) and prefix + SANDWICHED not in names
    return WeightKeys(embed, norm, found["lm_head"], layer if complete else None)
