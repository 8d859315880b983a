"""Hidden states of a tiny verifier over its own answers, in the layouts of other programs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.chat import encode_prompt
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import decoder_of, load_model, load_tokenizer
from tests.families import make_family
from tests.tiny import TEXT

LAYERS = [0, 2, 4]
COUNT = 8


@dataclass(frozen=True)
class Made:
    """One sample: ids, mask by token, aux states (outputs of `LAYERS`), and both final states."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: list[torch.Tensor]
    pre: torch.Tensor
    post: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def make_samples(folder: Path) -> list[Made]:
    """Writes a verifier into `folder` and runs it over its own greedy answers."""
    make_family("qwen3", folder)
    spec = VerifierSpec.open(folder)
    model: Any = load_model(spec, torch.float32, "cpu")
    tokenizer = load_tokenizer(spec)
    samples = []
    for number in range(COUNT):
        question = f"{number}. {TEXT[number % len(TEXT)]}"
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": question}])
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=12 + number, do_sample=False, min_new_tokens=12
        )
        output = model(input_ids=whole, output_hidden_states=True)
        last: dict[str, torch.Tensor] = {}
        decoder = decoder_of(model)
        hook = decoder.norm.register_forward_pre_hook(
            lambda module, inputs, last=last: last.__setitem__("pre", inputs[0])
        )
        model(input_ids=whole)
        hook.remove()
        outputs = [*output.hidden_states[1:-1], last["pre"]]  # of each decoder layer
        mask = torch.zeros(whole.shape[1], dtype=torch.int64)
        mask[len(prompt) :] = 1
        samples.append(
            Made(
                whole[0],
                mask,
                [outputs[k][0].clone() for k in LAYERS],
                last["pre"][0].clone(),
                output.hidden_states[-1][0].clone(),
                output.logits[0],
            )
        )
    return samples


def shifted_mask(mask: torch.Tensor) -> torch.Tensor:
    """By prediction: row t is marked where token t + 1 is an answer's."""
    return torch.cat([mask[1:], mask[:1]])


def write_v1(
    folder: Path, samples: Sequence[Made], *, final: str = "pre", mask: str = "token"
) -> Path:
    """As speculators v0.3 lays its folders out."""
    folder.mkdir(parents=True)
    for index, sample in enumerate(samples):
        stored = sample.mask if mask == "token" else shifted_mask(sample.mask)
        states = [*sample.aux, getattr(sample, final)]
        data = {"input_ids": sample.ids, "hidden_states": states, "loss_mask": stored}
        torch.save(data, folder / f"data_{index}.pt")
    config = {
        "version": "0.3.0",
        "generated_at": "2026-01-02T03:04:05+00:00",
        "reproducibility": {"command": "data_generation_offline.py", "package_versions": {}},
        "model": {"target_model_path": "tiny", "hidden_size": 64},
        "data": {"num_samples": len(samples)},
        "hidden_states": {"layer_ids": [*LAYERS, 4]},
        "format": {"file_pattern": "data_{idx}.pt", "data_format_version": 1, "schema": {}},
    }
    (folder / "data_config.json").write_text(json.dumps(config))
    return folder


def write_arrow(folder: Path, samples: Sequence[Made]) -> Path:
    """As speculators v0.5 and later do: an arrow data set, states in files beside it."""
    from datasets import Dataset

    rows = [
        {"input_ids": s.ids.tolist(), "loss_mask": s.mask.tolist(), "seq_len": len(s.ids)}
        for s in samples
    ]
    Dataset.from_list(rows).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for index, sample in enumerate(samples):
        states = torch.stack([*sample.aux, sample.pre], 1)
        save_file(
            {"hidden_states": states, "token_ids": sample.ids},
            folder / "hidden_states" / f"hs_{index}.safetensors",
        )
    return folder


def write_specforge(folder: Path, samples: Sequence[Made], *, compress_from: int = COUNT) -> Path:
    """As SpecForge's prepare_hidden_states does; from a sample on as with its --compress."""
    for index, sample in enumerate(samples):
        rows = folder / f"rows_{index // 5 * 5}-{index // 5 * 5 + 5}"
        rows.mkdir(parents=True, exist_ok=True)
        data = {
            "input_ids": sample.ids,
            "loss_mask": sample.mask,
            "hidden_state": sample.post[None],
            "aux_hidden_state": torch.cat(sample.aux, -1)[None],
        }
        if index < compress_from:
            torch.save(data, rows / f"data_{index}.ckpt")
        else:
            with gzip.open(rows / f"data_{index}.ckpt.gz", "wb", compresslevel=1) as file:
                torch.save(data, file)
    return folder
