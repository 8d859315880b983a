"""A verifier small enough to make in a second: random weights, a tokenizer trained on the spot; and
the shape of a drafter for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3.drafter import DrafterConfig

TEXT = (
    "Write a short story about a fox who learns to count.",
    "The fox counted the stones by the river, one by one, until the sun went down.",
    "What is the difference between a list and a tuple in Python?",
    "A list can be changed, a tuple cannot: def add(items): return items + (1,)",
    "You are a helpful assistant. Answer in one sentence, please.",
    "How many days are there in a year, and why is every fourth year longer?",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_tokenizer(folder: Path, vocab_size: int = 512) -> int:
    """Writes a byte-level BPE tokenizer with a ChatML template; returns its number of tokens.

    Ids 0, 1, 2 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, as in SmolLM2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "model_max_length": 2048,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer.get_vocab_size()


def tiny_drafter_config(vocab_size: int, draft_vocab_size: int, **changes: Any) -> DrafterConfig:
    """Shape of a drafter for the tiny verifier: reads layers 0, 2 and 3."""
    from eagle3.drafter import DrafterConfig

    shape: dict[str, Any] = {
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "aux_layers": (0, 2, 3),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    }
    sizes = {"vocab_size": vocab_size, "draft_vocab_size": draft_vocab_size}
    return DrafterConfig(**(shape | sizes | changes))


def make_tiny_verifier(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    hidden_size: int = 64,
    num_hidden_layers: int = 5,
    dtype: str = "bfloat16",
    spread: float = 0.15,
) -> Path:
    """Writes a Llama-like verifier in Hugging Face form: grouped-query attention, random weights.

    Args:
        tied: lm_head is the embedding.
        spread: standard deviation of the weights. Large enough that its greedy answers depend on
            what it was asked.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    vocab_size = make_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    return folder
