"""A drafter for decoding: `eagle3.drafter`'s layer with as little around its products as can be.

Stands in for the drafter that it is made of. Knows nothing of chains.

Shape suffixes as in `eagle3.drafter`: N rows, H drafter hidden size, G verifier hidden size, P aux
layers, D draft vocabulary, E head dimension; C positions with a rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eagle3.drafter import DraftCache, Drafter
from eagle3.lean_layer import (
    LayerShape,
    LeanLayer,
    Rotation,
    causal_mask,
    product,
    rotations,
)
from eagle3.rope import rotary


class LeanDrafter(Drafter):
    """A drafter for inference, with the same results; made once for all sequences.

    Args:
        drafter: whose weights are copied, in its dtype and on its device.
        pack: weights laid out for a CPU's matrix units, where `eagle3.packed_linear` can.
    """

    def __init__(self, drafter: Drafter, *, pack: bool) -> None:
        config = drafter.config
        super().__init__(config, drafter.embed_VH)
        self.to(device=drafter.fc.weight.device, dtype=drafter.fc.weight.dtype)
        self.load_state_dict(drafter.state_dict())
        self.eval().requires_grad_(False)
        self._shape = LayerShape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            scaling=config.head_dim**-0.5,
            eps=config.rms_norm_eps,
        )
        self._layer = LeanLayer(self._shape, self.midlayer, pack=pack)
        # In tuples, so that they do not become modules with weights under other names.
        self._products = (product(self.fc, pack=pack), product(self.lm_head, pack=pack))
        self._rotation: Rotation | None = None

    def fuse(self, aux_NPG: Tensor) -> Tensor:
        config = self.config
        if config.fc_norm:
            parts = zip(aux_NPG.unbind(1), self.fc_norm.parameters(), strict=True)
            aux_NPG = torch.stack([self._normed(part, weight) for part, weight in parts], dim=1)
        flat = aux_NPG.flatten(1)
        if config.norm_before_fc:
            flat = self._normed(flat, self.aux_norm.weight)
        return self._products[0](flat)

    def forward_cached(
        self, token_ids_N: Tensor, hidden_NH: Tensor, positions_N: Tensor, cache: DraftCache
    ) -> Tensor:
        """As the drafter's; positions have to be those in the cache."""
        layer, end = self.midlayer, cache.length + len(token_ids_N)
        embed_NH = functional.embedding(token_ids_N, self.embed_VH)
        normed_NH = self._normed(hidden_NH, layer.hidden_norm.weight)
        both = torch.cat([self._normed(embed_NH, layer.input_layernorm.weight), normed_NH], dim=-1)
        out_NH = self._layer.forward(
            both,
            normed_NH if self.config.norm_before_residual else hidden_NH,
            self._rotation_of(cache.length, end, hidden_NH),
            cache,
            causal_mask(len(token_ids_N), end, self._shape, hidden_NH),
        )
        return self._normed(out_NH, self.norm.weight) if self.config.norm_output else out_NH

    def logits(self, out_NH: Tensor) -> Tensor:
        if not self.config.norm_output:
            out_NH = self._normed(out_NH, self.norm.weight)
        return self._products[1](out_NH)

    def _normed(self, x_NH: Tensor, weight_H: Tensor) -> Tensor:
        return torch.rms_norm(x_NH, x_NH.shape[1:], weight_H, self.config.rms_norm_eps)

    def _rotation_of(self, start: int, end: int, like_NH: Tensor) -> Rotation:
        if self._rotation is None or end > len(self._rotation[0]):
            at_C = torch.arange(max(1024, 2 * end), device=like_NH.device)
            cos, sin = rotary(at_C, self.inverse_frequencies, like_NH.dtype)
            self._rotation = rotations(torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
        cos, sin = self._rotation
        return cos[start:end], sin[start:end]
