"""A verifier and its drafter whose every token is known by hand, for engines that run real weights.

The verifier has one-hot embeddings and layers of zeros: a state is its token, whatever stood
before, and the output matrix sends token i to `following(i)`. Its drafter reads the last aux state
as it is, its MLP turns state i into state `following(i)` and its head is the verifier's: each draft
is right where the draft vocabulary has it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.drafter import Drafter, DrafterConfig
from eagle3.vocab import DraftVocabulary

SIZE, LAYERS, AUX = 256, 3, (0, 1, 2)
SHARP = 20.0


def following(token: int) -> int:
    """Tokens 8 to 27 go round; every other token leads among them."""
    return 8 + (token - 8 + 7) % 20


def chain(token: int, count: int) -> list[int]:
    """The verifier's greedy answer after a prompt that ends in `token`."""
    answer = []
    for _ in range(count):
        token = following(token)
        answer.append(token)
    return answer


def _next() -> torch.Tensor:
    return torch.tensor([following(token) for token in range(SIZE)])


def write_verifier(folder: Path) -> Path:
    """Writes it in Hugging Face form, float32."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from tests.tiny import make_tiny_tokenizer

    make_tiny_tokenizer(folder, SIZE)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=SIZE, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0 if "norm" in name else 0.0)
    model.model.embed_tokens.weight.data.copy_(torch.eye(SIZE))
    model.lm_head.weight.data[_next(), torch.arange(SIZE)] = SHARP
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    return folder


def make_drafter(draftable: list[int], aux: tuple[int, ...] = AUX) -> Drafter:
    """Always right where the right token is among `draftable`, ascending."""
    vocabulary = DraftVocabulary.from_targets(torch.tensor(draftable), SIZE)
    config = DrafterConfig(
        hidden_size=SIZE, target_hidden_size=SIZE, intermediate_size=SIZE, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=SIZE, draft_vocab_size=len(draftable),
        aux_layers=aux, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
    )  # fmt: skip
    drafter = Drafter(config, torch.eye(SIZE))
    for name, parameter in drafter.named_parameters():
        parameter.data.fill_(1.0 if "norm" in name else 0.0)
    drafter.fc.weight.data[:, -SIZE:] = torch.eye(SIZE)
    # The norm makes state i a row with sqrt(H) at i; silu(x) of a large x is x.
    mlp, root = drafter.midlayer.mlp, SIZE**0.5
    mlp.gate_proj.weight.data.copy_(torch.eye(SIZE) * SHARP)
    mlp.up_proj.weight.data.copy_(torch.eye(SIZE))
    step = -torch.eye(SIZE)
    step[_next(), torch.arange(SIZE)] += 1.0
    mlp.down_proj.weight.data.copy_(step / (SHARP * root * root))
    for row, target in enumerate(draftable):
        drafter.lm_head.weight.data[row, _next() == target] = SHARP
    drafter.d2t.copy_(vocabulary.d2t)
    drafter.t2d.copy_(vocabulary.t2d)
    return drafter.eval().requires_grad_(False)
