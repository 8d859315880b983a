"""A tiny verifier's head, and drafters for it."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.checkpoint import save_drafter
from eagle3.initialise import DrafterSettings, new_drafter
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead
from eagle3.vocab import DraftVocabulary

V, H, HEADS, KV, E, F = 30, 16, 4, 2, 4, 24
LAYERS = (0, 2, 3)


def make_head(hidden: int = H, layers: int = 5, vocab: int = V) -> VerifierHead:
    draw = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    config = HeadConfig(
        verifier="tiny",
        config_hash="0",
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocab,
        intermediate_size=F,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=E,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_ids=[1],
        norm_offset=0.0,
        embed_scale=1.0,
        logit_scale=1.0,
        logit_softcap=None,
    )
    layer = {
        "input_layernorm.weight": weight(hidden),
        "post_attention_layernorm.weight": weight(hidden),
        "self_attn.q_proj.weight": weight(HEADS * E, hidden),
        "self_attn.k_proj.weight": weight(KV * E, hidden),
        "self_attn.v_proj.weight": weight(KV * E, hidden),
        "self_attn.o_proj.weight": weight(hidden, HEADS * E),
        "mlp.gate_proj.weight": weight(F, hidden),
        "mlp.up_proj.weight": weight(F, hidden),
        "mlp.down_proj.weight": weight(hidden, F),
    }
    return VerifierHead(config, weight(vocab, hidden), weight(hidden), weight(vocab, hidden), layer)


def vocabulary(*ids: int) -> DraftVocabulary:
    return DraftVocabulary.from_targets(torch.tensor(ids), V)


def saved(folder: Path, **settings: object) -> Path:
    head = make_head()
    chosen = DrafterSettings.model_validate(settings)
    drafter = new_drafter(head, vocabulary(1, 4, 9), LAYERS, chosen, seed=3)
    save_drafter(folder, drafter, head.config, torch.float32)
    return folder
