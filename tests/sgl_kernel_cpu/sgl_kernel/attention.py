"""Attention over the paged key-value pool, as operators `torch.ops.sgl_kernel.*`.

Each request is attended by itself, in float32 whatever the dtype of the pool. Grouped queries,
latent attention (values narrower than keys), logit caps, sliding windows, sinks, and draft trees.

Shape suffixes: N new rows of all requests, B requests, S slots, Q query heads, K key heads, D size
of a query and key, E of a value, P longest request.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_TAIL = "float sm_scale, float logit_cap, bool is_cross, int window, Tensor? encoder_lens"
_LIBRARY.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_extend_len, "
    f"{_TAIL}, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
_LIBRARY.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits, "
    f"Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, {_TAIL}, Tensor? sinks) -> ()"
)


def _attend(
    q_NQD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    sees_NS: Tensor,
    scale: float,
    logit_cap: float,
    sinks_Q: Tensor | None,
) -> Tensor:
    """[N, Q, E] in float32."""
    rows, heads, _ = q_NQD.shape
    slots, key_heads, _ = k_SKD.shape
    grouped = q_NQD.float().view(rows, key_heads, heads // key_heads, -1)
    scores = torch.einsum("nkgd,skd->nkgs", grouped, k_SKD.float()) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~sees_NS[:, None, None, :], float("-inf"))
    if sinks_Q is not None:
        sink = sinks_Q.float().view(1, key_heads, -1, 1).expand(rows, -1, -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :slots]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("nkgs,ske->nkge", weights, v_SKE.float()).reshape(rows, heads, -1)


def _window(rows_N: Tensor, columns_S: Tensor, window: int) -> Tensor:
    """[N, S]: within the last `window` positions; 0 is no bound."""
    near = torch.ones(len(rows_N), len(columns_S), dtype=torch.bool)
    return near if window <= 0 else rows_N[:, None] - columns_S[None, :] < window


def extend_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, o: Tensor, k_buffer: Tensor, v_buffer: Tensor,
    k_scale: float, v_scale: float, req_to_token: Tensor, req_pool_indices: Tensor,
    seq_lens: Tensor, extend_seq_lens: Tensor, extend_start_loc: Tensor, max_extend_len: int,
    sm_scale: float, logit_cap: float, is_cross: bool, window: int, encoder_lens: Tensor | None,
    sinks: Tensor | None, tree_mask: Tensor | None, is_causal: bool,
) -> None:  # fmt: skip
    """Several new rows a request: `seq_lens` counts them. Keys and values of the rows before come
    from the pool, those of the new rows from `k` and `v` where given."""
    if is_cross:
        raise NotImplementedError("cross attention")
    mask_start = 0
    for row, length, new, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(),
        extend_start_loc.tolist(), strict=True,
    ):  # fmt: skip
        piece = slice(start, start + new)
        cached = length if k is None or v is None else length - new
        slots = req_to_token[row, :cached].long()
        keys, values = k_buffer[slots].float() * k_scale, v_buffer[slots].float() * v_scale
        if k is not None and v is not None:
            # Latent attention without cached rows multiplies its keys and values out: they have
            # more heads then, and another size, than the pool.
            keys = torch.cat([keys, k[piece].float()]) if cached else k[piece].float()
            values = torch.cat([values, v[piece].float()]) if cached else v[piece].float()
        columns = torch.arange(length)
        rows = torch.arange(length - new, length)
        sees = _window(rows, columns, window)
        if tree_mask is not None:
            block = tree_mask[mask_start : mask_start + new * length].view(new, length)
            sees = sees & block.bool()
            mask_start += new * length
        elif is_causal:
            sees = sees & (columns[None, :] <= rows[:, None])
        o[piece] = _attend(q[piece], keys, values, sees, sm_scale, logit_cap, sinks).to(o.dtype)


def decode_attention(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float, o: Tensor,
    k: Tensor | None, v: Tensor | None, loc: Tensor, attn_logits: Tensor, req_to_token: Tensor,
    req_pool_indices: Tensor, seq_lens: Tensor, sm_scale: float, logit_cap: float, is_cross: bool,
    window: int, encoder_lens: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """One new row a request: `seq_lens` counts it. Its key and value are first written to `loc`."""
    if is_cross:
        raise NotImplementedError("cross attention")
    if k is not None and v is not None:
        k_buffer[loc.long()] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc.long()] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for number, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        slots = req_to_token[row, :length].long()
        sees = _window(torch.tensor([length - 1]), torch.arange(length), window)
        out = _attend(
            q[number : number + 1], k_buffer[slots].float() * k_scale,
            v_buffer[slots].float() * v_scale, sees, sm_scale, logit_cap, sinks,
        )  # fmt: skip
        o[number] = out[0].to(o.dtype)


_LIBRARY.impl("extend_attention_cpu", extend_attention, "CPU")
_LIBRARY.impl("decode_attention_cpu", decode_attention, "CPU")
