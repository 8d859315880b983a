"""Which hidden state an engine means by a layer id: the one place that translates.

In this project a layer index is post-layer: k is the output of decoder layer k, residual added,
before any further norm; transformers' `hidden_states[k + 1]`. Everything else is said here, as read
in SGLang 0.5.23, vLLM 0.32, transformers 5 and speculators 0.3 to 0.9, and tested by value.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.errors import HarnessError

# Verifiers whose SGLang code takes ids as inputs of layers, unless the first id is 1. All others
# add 1 to every id.
RAW_LAYER_IDS = frozenset(
    [
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
        *("kimi_k2", "kimi_k25"),
    ]
)


def vllm_ids(aux_layers: Sequence[int]) -> list[int]:
    """vLLM's ids: k is the input of layer k, transformers' `hidden_states[k]`; the number of layers
    is the last layer's output, before the final norm (transformers' last entry is after it). The
    ids in speculators' drafters are these; those of its data are outputs of layers, as here."""
    return [layer + 1 for layer in aux_layers]


def from_vllm(ids: Sequence[int]) -> list[int]:
    """Post-layer indices of vLLM's ids; -1 is the embeddings."""
    return [one - 1 for one in ids]


def sglang_layer_ids(aux_layers: Sequence[int], model_type: str) -> list[int]:
    """SGLang's explicit ids for a verifier, as a drafter's config holds them.

    Raises:
        HarnessError: layers not in ascending order, in which SGLang captures whatever order ids are
            in; or a first id that SGLang would read as another.
    """
    if list(aux_layers) != sorted(aux_layers):
        raise HarnessError(
            "SGLang would give the drafter its layers in another order",
            where="aux layers", rule="ascending", got=list(aux_layers),
            fix="train with ascending layers to serve in SGLang",
        )  # fmt: skip
    return _told(aux_layers, model_type)


def _told(layers: Sequence[int], model_type: str) -> list[int]:
    if model_type not in RAW_LAYER_IDS:
        return list(layers)
    raw = [layer + 1 for layer in layers]
    if raw[0] == 1:
        raise HarnessError(
            "SGLang cannot capture the output of layer 0 first for this verifier",
            where=f"aux layers of a {model_type} verifier",
            rule="a first id of 1 makes SGLang add 1 to every id",
            got=list(layers),
            fix="start with a later layer",
        )
    return raw


def from_sglang(ids: Sequence[int], model_type: str) -> list[int]:
    """Post-layer indices of SGLang's explicit ids for a verifier, ascending, as SGLang delivers
    the states; -1 is the embeddings."""
    shifted = model_type in RAW_LAYER_IDS and ids[0] != 1
    return sorted(one - 1 if shifted else one for one in ids)


def sglang_capture_ids(aux_layers: Sequence[int], model_type: str, num_layers: int) -> list[int]:
    """Ids for SGLang's capture without a drafter, in an order that SGLang reads as they are meant.

    Raises:
        HarnessError: the last layer, whose output SGLang does not capture, or layer 0 alone of a
            verifier for which it cannot be told.
    """
    if max(aux_layers) > num_layers - 2:
        raise HarnessError(
            "SGLang does not capture the output of the last layer", where="aux layers",
            rule=f"post-layer indices from 0 to {num_layers - 2}", got=list(aux_layers),
            fix="leave it out, or extract with the transformers backend",
        )  # fmt: skip
    return _told(sorted(aux_layers, reverse=True), model_type)
