"""The EAGLE-3 drafter: one Llama block over (next token's embedding, fused aux hidden states).

Paper: EAGLE-3, https://arxiv.org/abs/2503.01840. Weights carry the names of EAGLE's checkpoints,
which SGLang and vLLM read. This file holds the layer and its cached use while drafting; training
reads the same weights through `eagle3.ttt`.

Legend: N rows, H drafter hidden size, G verifier hidden size, V vocabulary, D draft vocabulary,
A attention heads, K key-value heads, E head dimension, P aux layers, C cached rows.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagle3.rope import inverse_frequencies, rotary, rotate
from eagle3.settings import Settings


class DrafterConfig(Settings):
    """Shape and variant of a drafter. The switches change what is computed when serving:

    norm_before_residual: the residual is the normed hidden state instead of the un-normed one.
    norm_before_fc: one RMSNorm over the concatenated aux states before `fc`.
    fc_norm: one RMSNorm for each aux state before `fc`.
    norm_output: the state fed to the next draft step is the one after `norm`.
    """

    hidden_size: PositiveInt
    target_hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    aux_layers: tuple[int, ...]
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm with its statistics in at least float32, as Llama computes it."""
    wide = x_NH if x_NH.dtype == torch.float64 else x_NH.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x_NH.dtype) * weight_H


class RMSNorm(nn.Module):
    """Holds the weight of a norm, under the name that checkpoints give it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """Holds the projections; queries, keys and values read `[embedding, hidden]`, 2H wide."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = 2 * config.hidden_size
        heads = config.num_attention_heads * config.head_dim
        key_value = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, key_value, bias=False)
        self.v_proj = nn.Linear(width, key_value, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)


class MLP(nn.Module):
    """Holds the projections of the gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = MLP(config)


class DraftCache:
    """Keys and values of the rows drafted from so far; grows by doubling."""

    def __init__(self) -> None:
        self.length = 0
        self._keys_CKE: Tensor | None = None
        self._values_CKE: Tensor | None = None

    def append(self, keys_NKE: Tensor, values_NKE: Tensor) -> tuple[Tensor, Tensor]:
        """Adds rows; returns keys and values of all rows, [C, K, E]."""
        end = self.length + len(keys_NKE)
        if self._keys_CKE is None or self._values_CKE is None or end > len(self._keys_CKE):
            room = max(256, 2 * end)
            old_keys, old_values = self._keys_CKE, self._values_CKE
            self._keys_CKE = keys_NKE.new_empty(room, *keys_NKE.shape[1:])
            self._values_CKE = values_NKE.new_empty(room, *values_NKE.shape[1:])
            if old_keys is not None and old_values is not None:
                self._keys_CKE[: self.length] = old_keys[: self.length]
                self._values_CKE[: self.length] = old_values[: self.length]
        self._keys_CKE[self.length : end] = keys_NKE
        self._values_CKE[self.length : end] = values_NKE
        self.length = end
        return self._keys_CKE[:end], self._values_CKE[:end]

    def crop(self, length: int) -> None:
        """Forgets every row from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} rows to {length}")
        self.length = length


class Drafter(nn.Module):
    """A drafter and the verifier's frozen embedding it reads tokens through.

    Args:
        embed_VH: the verifier's embedding, as the layer reads it (already scaled where the
            verifier scales it); kept out of checkpoints and never trained.
    """

    d2t: Tensor
    t2d: Tensor
    embed_VH: Tensor
    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig, embed_VH: Tensor) -> None:
        super().__init__()
        self.config = config
        aux_width = len(config.aux_layers) * config.target_hidden_size
        if config.norm_before_fc:
            self.aux_norm = RMSNorm(aux_width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size) for _ in config.aux_layers
            )
        self.fc = nn.Linear(aux_width, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.register_buffer("inverse_frequencies", inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Drafter:
        # `.to(bfloat16)` would round the frequencies too: at position 200 that is half a radian.
        super()._apply(fn, recurse)
        exact = inverse_frequencies(self.config)
        self.inverse_frequencies = exact.to(self.inverse_frequencies.device)
        return self

    def fuse(self, aux_NPG: Tensor) -> Tensor:
        """`fc` over the concatenated aux states: [N, P, G] to [N, H]."""
        config = self.config
        if config.fc_norm:
            aux_NPG = torch.stack(
                [
                    rms_norm(aux_NPG[:, i], weight.to(aux_NPG.dtype), config.rms_norm_eps)
                    for i, weight in enumerate(self.fc_norm.parameters())
                ],
                dim=1,
            )
        flat = aux_NPG.flatten(1)
        if config.norm_before_fc:
            flat = rms_norm(flat, self.aux_norm.weight.to(flat.dtype), config.rms_norm_eps)
        return F.linear(flat, self.fc.weight.to(flat.dtype))

    def forward_cached(
        self, token_ids_N: Tensor, hidden_NH: Tensor, positions_N: Tensor, cache: DraftCache
    ) -> Tensor:
        """One pass of the layer over N new rows, causal over the cache and among themselves.

        Args:
            token_ids_N: i64, the token after each row's own.
            hidden_NH: `fuse(aux)` of the row, or the output of the row drafted before it.
            positions_N: i64, RoPE positions.

        Returns:
            [N, H], what the next draft step is fed and `logits` reads.
        """
        config, layer, eps = self.config, self.midlayer, self.config.rms_norm_eps
        rows = len(token_ids_N)
        embed_NH = rms_norm(self.embed_VH[token_ids_N], layer.input_layernorm.weight, eps)
        normed_NH = rms_norm(hidden_NH, layer.hidden_norm.weight, eps)
        residual_NH = normed_NH if config.norm_before_residual else hidden_NH
        both = torch.cat([embed_NH, normed_NH], dim=-1)
        attention = layer.self_attn
        rotation = rotary(positions_N, self.inverse_frequencies, both.dtype)
        q_NAE = rotate(attention.q_proj(both).view(rows, -1, config.head_dim), *rotation)
        k_NKE = rotate(attention.k_proj(both).view(rows, -1, config.head_dim), *rotation)
        v_NKE = attention.v_proj(both).view(rows, -1, config.head_dim)
        k_CKE, v_CKE = cache.append(k_NKE, v_NKE)
        mixed = cached_attention(q_NAE, k_CKE, v_CKE)
        hidden_NH = residual_NH + attention.o_proj(mixed.reshape(rows, -1))
        normed_NH = rms_norm(hidden_NH, layer.post_attention_layernorm.weight, eps)
        mlp = layer.mlp
        gated = F.silu(mlp.gate_proj(normed_NH)) * mlp.up_proj(normed_NH)
        hidden_NH = hidden_NH + mlp.down_proj(gated)
        if config.norm_output:
            return rms_norm(hidden_NH, self.norm.weight, eps)
        return hidden_NH

    def logits(self, out_NH: Tensor) -> Tensor:
        """Scores over the draft vocabulary, [N, D], of what `forward_cached` returned."""
        if not self.config.norm_output:
            out_NH = rms_norm(out_NH, self.norm.weight, self.config.rms_norm_eps)
        return self.lm_head(out_NH)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Token ids of draft-vocabulary ids: `d2t` holds offsets."""
        return draft_ids + self.d2t[draft_ids]


def cached_attention(q_NAE: Tensor, k_CKE: Tensor, v_CKE: Tensor) -> Tensor:
    """The last N of C rows attend causally; grouped heads are never copied. Returns [N, A, E].

    The query heads of one key-value head become rows of one small attention, since at N of 1 to 4
    expanding the keys costs more than the attention itself.
    """
    rows, heads, size = q_NAE.shape
    cached, kv_heads, _ = k_CKE.shape
    group = heads // kv_heads
    q = q_NAE.view(rows, kv_heads, group, size).permute(1, 2, 0, 3)
    q = q.reshape(kv_heads, group * rows, size)
    mask = None
    if rows > 1:
        own = torch.arange(cached - rows, cached, device=q.device)
        mask = own[:, None] >= torch.arange(cached, device=q.device)
        mask = mask.repeat(group, 1)
    mixed = F.scaled_dot_product_attention(
        q[None], k_CKE.transpose(0, 1)[None], v_CKE.transpose(0, 1)[None], attn_mask=mask
    )
    return mixed.view(kv_heads, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)
