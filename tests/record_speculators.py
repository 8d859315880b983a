"""Losses and gradients of the PyPI package `speculators==0.9.0`, for `test_speculators_parity.py`.

    make .venv-speculators/.ready
    .venv-speculators/bin/python -m tests.record_speculators tests/recorded/speculators.safetensors

Runs in an environment of its own, without this project's dependencies. A tiny drafter and packed
documents with ragged masks are drawn, put through the package's model (sdpa, float32, no autocast)
for three TTT steps, and written together with what came out: `weight/...` under the names of EAGLE
checkpoints, `batch/...` unshifted, `<variant>/loss` [steps] and `<variant>/gradient/...` of their
sum, one variant for each switch of the layer.

The package decides rows by the input token's mask alone, even across documents. The masks here
leave out each document's last token and its first three, so that this means the same rows as
"the token asked for lies in the same document".
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.benchmarks.speculators_model import (
    SWITCHES,
    VERSION,
    build,
    package_name,
    require_version,
)

STEPS = 3
SIZES = {
    "hidden_size": 16, "target_hidden_size": 16, "intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40,
    "draft_vocab_size": 23, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {"plain": (), **{name: (name,) for name in SWITCHES}}
MASKS = ("000110111010", "0001111110", "0000010110111110")
PADDING = 6


def draw_weights(draw: torch.Generator) -> dict[str, Tensor]:
    """Weights of a drafter with every optional norm, and the verifier's, none of them special."""
    hidden, inner, vocab = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    heads = SIZES["num_attention_heads"] * SIZES["head_dim"]
    key_value = SIZES["num_key_value_heads"] * SIZES["head_dim"]
    draft = SIZES["draft_vocab_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "aux_norm.weight": (3 * hidden,),
        **{f"fc_norm.{i}.weight": (hidden,) for i in range(3)},
        "lm_head.weight": (draft, hidden),
        "embed": (vocab, hidden),
        "verifier_norm": (hidden,),
        "verifier_lm_head": (vocab, hidden),
    }
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=draw) * 0.4
        weights[name] = drawn + 1.0 if len(shape) == 1 else drawn
    target_ids = torch.randperm(vocab, generator=draw)[:draft].sort().values
    weights["d2t"] = target_ids - torch.arange(draft)
    return weights


def draw_batch(draw: torch.Generator) -> dict[str, Tensor]:
    """Documents one after another, unshifted; `final` is from before the verifier's norm."""
    lengths = [len(mask) for mask in MASKS]
    rows, hidden = sum(lengths), SIZES["hidden_size"]
    return {
        "lengths": torch.tensor(lengths),
        "token_ids": torch.randint(SIZES["vocab_size"], (rows,), generator=draw),
        "loss_mask": torch.tensor([bit == "1" for mask in MASKS for bit in mask]),
        "aux": torch.randn(rows, 3, hidden, generator=draw),
        "final": torch.randn(rows, hidden, generator=draw) * 2.0,
    }


def build_variant(weights: dict[str, Tensor], switches: tuple[str, ...]) -> torch.nn.Module:
    """The package's model with these weights."""
    target_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    own = {name: value for name, value in weights.items() if name.endswith(".weight")}
    t2d = torch.isin(torch.arange(int(SIZES["vocab_size"])), target_ids)
    return build(
        {**SIZES, **dict.fromkeys(switches, True)},
        {**own, "d2t": weights["d2t"], "t2d": t2d},
        embed_VH=weights["embed"],
        target_rows_DG=weights["verifier_lm_head"][target_ids],
        target_norm_G=weights["verifier_norm"],
        ttt_steps=STEPS,
    )


def collate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch as the package's own data loader hands it on: shifted, packed, padded."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    lengths = batch["lengths"].tolist()
    names = ("token_ids", "loss_mask", "aux", "final")
    parts = zip(*(batch[name].split(lengths) for name in names), strict=True)
    samples = [
        {
            "input_ids": tokens,
            "hidden_states": aux.flatten(1),
            "verifier_last_hidden_states": final,
            "loss_mask": mask,
            "lengths": torch.tensor([len(tokens)]),
            "position_ids": torch.arange(len(tokens)),
        }
        for tokens, mask, aux, final in parts
    ]
    room = sum(lengths) - len(lengths) + PADDING
    together = CollateFn(room, SIZES["hidden_size"], dtype=torch.float32, preprocess=shift_batch)
    collated = together(samples)
    collated.pop("error_records")
    return collated


def record() -> dict[str, Tensor]:
    """Everything that the file holds."""
    from speculators.losses import resolve_loss_config

    draw = torch.Generator().manual_seed(0)
    weights, batch = draw_weights(draw), draw_batch(draw)
    found = {f"weight/{name}": value for name, value in weights.items()}
    found |= {f"batch/{name}": value for name, value in batch.items()}
    for variant, switches in VARIANTS.items():
        model = build_variant(weights, switches)
        _, loss, metrics = model(
            **collate(batch),
            ttt_steps=STEPS,
            ttt_step_loss_decay=1.0,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        loss.backward()
        found[f"{variant}/loss"] = torch.stack([metrics[f"loss_{k}_sum"] for k in range(STEPS)])
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name in weights:
            gradient = gradients.get(package_name(name))
            if gradient is not None:
                found[f"{variant}/gradient/{name}"] = gradient
    return found


if __name__ == "__main__":
    require_version()
    torch.set_num_threads(1)
    about = {
        "speculators": VERSION, "torch": torch.__version__, "sizes": SIZES, "variants": VARIANTS,
    }  # fmt: skip
    save_file(record(), sys.argv[1], {name: json.dumps(value) for name, value in about.items()})
