"""The verifier for decoding with as little around its matrix products as can be.

For Llama and what differs from it in nothing but biases and norms of heads; every other verifier is
decoded through transformers' own forward pass. Knows nothing of drafters.

Shape suffixes: N new rows, M rows with logits, V vocabulary, n aux layers, H hidden size, E head
size, C positions with a rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle3.cached_verifier import CachedVerifier, check_aux_layers
from eagle3.decode import Rows
from eagle3.drafter import DraftCache
from eagle3.lean_layer import (
    LayerShape,
    LeanLayer,
    Rotation,
    causal_mask,
    product,
    rotations,
)
from eagle3.packed_linear import pack_linears
from eagle3.verifier_model import decoder_of

# The exact classes: one that inherits from them may compute something else.
KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # the same at any length


def decoding_verifier(
    model: Any, aux_layers: Sequence[int], *, pack: bool
) -> LeanVerifier | CachedVerifier:
    """The fastest way to decode with a verifier.

    Args:
        model: transformers causal LM in eval mode. Used up: its layers may be taken apart.
        aux_layers: post-layer indices, k = output of decoder layer k with its residual added.
        pack: weights laid out for a CPU's matrix units, where `eagle3.packed_linear` can. Pays in
            bfloat16; in float32 for several rows only.
    """
    if is_lean(model):
        return LeanVerifier(model, aux_layers, pack=pack)
    if pack:
        pack_linears(model)
    return CachedVerifier(model, aux_layers)


def is_lean(model: Any) -> bool:
    """Whether `LeanVerifier` computes what this model does."""
    kind = type(model)
    if kind.__name__ not in KNOWN or not kind.__module__.startswith("transformers.models."):
        return False
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    head_size = model.model.layers[0].self_attn.head_dim
    return (
        config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        # Mistral's window stands beside no layer types.
        and (type(config).__name__ != "MistralConfig" or config.sliding_window is None)
        and rope.get("rope_type", "default") in FIXED_ROTATIONS
        and model.model.rotary_emb.inv_freq.numel() * 2 == head_size
        # Adapters and quantised weights come as other classes.
        and all(type(one) is nn.Linear for one in _products(model))
    )


def _products(model: Any) -> list[nn.Module]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    found = [model.lm_head]
    for layer in model.model.layers:
        found += [getattr(layer.self_attn, name) for name in names]
        found += [getattr(layer.mlp, name) for name in mlp]
    return found


class LeanVerifier:
    """One sequence's verifier; a `Verifier` of `eagle3.decode`.

    Args:
        model: one that `is_lean` knows. Its layers are taken apart as they are read, so that their
            weights are held once.
        aux_layers: as `decoding_verifier`.

    Raises:
        HarnessError: a layer that does not exist.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int], *, pack: bool) -> None:
        decoder, config = decoder_of(model), model.config
        check_aux_layers(aux_layers, config.num_hidden_layers)
        attention = decoder.layers[0].self_attn
        self._shape = LayerShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            scaling=attention.scaling,
            eps=config.rms_norm_eps,
        )
        self._aux_layers = list(aux_layers)
        self._embed_VH = decoder.embed_tokens.weight.detach()
        self._norm_H = decoder.norm.weight.detach()
        self._head = product(model.lm_head, pack=pack)
        self._rotary = decoder.rotary_emb
        self._rotation: Rotation | None = None
        self._layers: list[tuple[Tensor, LeanLayer]] = []
        for number, layer in enumerate(decoder.layers):
            taken = LeanLayer(self._shape, layer, pack=pack)
            self._layers.append((layer.input_layernorm.weight.detach(), taken))
            decoder.layers[number] = nn.Identity()
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence."""
        self._caches = [DraftCache() for _ in self._layers]

    @property
    def length(self) -> int:
        """Rows in the cache."""
        return self._caches[0].length

    @property
    def device(self) -> torch.device:
        """Where token ids have to lie."""
        return self._embed_VH.device

    @torch.inference_mode()
    def forward(self, token_ids_N: Tensor, logits_rows: int) -> Rows:
        """See `eagle3.decode.Verifier`; logits are float32 or wider, whose argmax is faster than
        bfloat16's."""
        rows, start = len(token_ids_N), self.length
        hidden_NH = functional.embedding(token_ids_N, self._embed_VH)
        width, eps = hidden_NH.shape[1:], self._shape.eps
        rotation = self._rotation_of(start, start + rows, hidden_NH)
        mask = causal_mask(rows, start + rows, self._shape, hidden_NH)
        outputs = []
        for (norm_H, layer), cache in zip(self._layers, self._caches, strict=True):
            normed_NH = torch.rms_norm(hidden_NH, width, norm_H, eps)
            hidden_NH = layer.forward(normed_NH, hidden_NH, rotation, cache, mask)
            outputs.append(hidden_NH)
        last_MH = torch.rms_norm(hidden_NH[-logits_rows:], width, self._norm_H, eps)
        aux_NLH = torch.stack([outputs[layer] for layer in self._aux_layers], dim=1)
        logits_MV = self._head(last_MH)
        wide = torch.promote_types(logits_MV.dtype, torch.float32)
        return Rows(logits_MV=logits_MV.to(wide), aux_NLH=aux_NLH)

    def crop(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        for cache in self._caches:
            cache.crop(length)

    def close(self) -> None:
        """Nothing to give back: the model was taken apart."""

    def _rotation_of(self, start: int, end: int, like_NH: Tensor) -> Rotation:
        if self._rotation is None or end > len(self._rotation[0]):
            at_1C = torch.arange(max(1024, 2 * end), device=like_NH.device)[None]
            cos_1CE, sin_1CE = self._rotary(like_NH, at_1C)
            self._rotation = rotations(cos_1CE[0], sin_1CE[0])
        cos, sin = self._rotation
        return cos[start:end], sin[start:end]
