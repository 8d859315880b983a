"""EAGLE-3's training-time test written as plainly as the paper: dense masks, whole rows, autograd.

One document after another, every row at every step, the attention of step k as one softmax over
step 0's keys and the diagonals of later steps. Slow and obvious; for tests only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.drafter import Drafter
from eagle3.loss import TargetHead
from eagle3.packing import Batch
from eagle3.rope import rotary, rotate


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def document_logits(drafter: Drafter, token_ids: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
    """Draft logits [T - 1 - k, D] of each step k for the rows that have a token at t + 1 + k."""
    config, layer, eps = drafter.config, drafter.midlayer, drafter.config.rms_norm_eps
    length, heads, size = len(token_ids), config.num_attention_heads, config.head_dim
    group = heads // config.num_key_value_heads
    states = aux
    if config.fc_norm:
        states = torch.stack(
            [norm(aux[:, i], m.weight, eps) for i, m in enumerate(drafter.fc_norm)], 1
        )
    states = states.flatten(1)
    if config.norm_before_fc:
        states = norm(states, drafter.aux_norm.weight, eps)
    hidden = states @ drafter.fc.weight.T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    for step in range(steps):
        rows = torch.arange(length)
        # Rows without a token that far ahead read the last one; nothing looks at them.
        token = token_ids[(rows + 1 + step).clamp(max=length - 1)]
        embed = norm(drafter.embed_VH[token], layer.input_layernorm.weight, eps)
        normed = norm(hidden, layer.hidden_norm.weight, eps)
        residual = normed if config.norm_before_residual else hidden
        both = torch.cat([embed, normed], -1)
        turn = rotary(rows + step, drafter.inverse_frequencies, both.dtype)
        q = rotate((both @ layer.self_attn.q_proj.weight.T).view(length, heads, size), *turn)
        k = rotate((both @ layer.self_attn.k_proj.weight.T).view(length, -1, size), *turn)
        v = (both @ layer.self_attn.v_proj.weight.T).view(length, -1, size)
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        scores = torch.einsum("qae,kae->aqk", q, torch.cat(keys)) / size**0.5
        causal = rows[:, None] >= rows[None]
        diagonal = torch.eye(length, dtype=torch.bool)
        mask = torch.cat([causal] + [diagonal] * step, dim=1)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        mixed = torch.einsum("aqk,kae->qae", weights, torch.cat(values)).flatten(1)
        hidden = residual + mixed @ layer.self_attn.o_proj.weight.T
        normed = norm(hidden, layer.post_attention_layernorm.weight, eps)
        gate = normed @ layer.mlp.gate_proj.weight.T
        up = normed @ layer.mlp.up_proj.weight.T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
        out = norm(hidden, drafter.norm.weight, eps)
        if config.norm_output:
            hidden = out
        logits.append((out @ drafter.lm_head.weight.T)[: max(length - 1 - step, 0)])
    return logits


def reference_losses(
    drafter: Drafter, batch: Batch, head: TargetHead, steps: int
) -> tuple[list[Tensor], list[int]]:
    """Mean soft cross-entropy of each step over its supervised rows, and their number."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    counts = [0] * steps
    for start, end in batch.spans:
        mask = batch.loss_mask_N[start:end]
        p = (batch.final_NG[start:end] @ head.rows_DG.T).softmax(-1)
        logits = document_logits(
            drafter, batch.token_ids_N[start:end], batch.aux_NPG[start:end], steps
        )
        for step in range(steps):
            for t in range(end - start):
                if t + 2 + step < end - start and mask[t + 1 + step]:
                    logq = logits[step][t].log_softmax(-1)
                    sums[step] = sums[step] - (p[t + 1 + step] * logq).sum()
                    counts[step] += 1
    return [total / max(n, 1) for total, n in zip(sums, counts, strict=True)], counts
