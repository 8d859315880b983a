"""Drafter checkpoints: a folder of `model.safetensors` and `config.json` in EAGLE's layout.

That is what SGLang and vLLM serve; the same layout, in float32, is what training keeps.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import HarnessError
from eagle3.formats.eagle import eagle_config, read_eagle_config
from eagle3.reading import open_tensors, read_object
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead
from eagle3.workspace import write_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def embedding(head: VerifierHead, dtype: torch.dtype) -> Tensor:
    """The verifier's embedding as its layers see it, [V, H]."""
    embed = head.embed.to(dtype)
    return embed if head.config.embed_scale == 1.0 else embed * head.config.embed_scale


def save_drafter(folder: Path, drafter: Drafter, verifier: HeadConfig, dtype: torch.dtype) -> None:
    """Writes a checkpoint into a folder that is made if missing.

    Args:
        dtype: of the stored weights; id maps keep theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous().cpu()
        for name, value in drafter.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    write_json(
        folder / CONFIG,
        eagle_config(
            drafter.config,
            verifier=verifier.verifier,
            config_hash=verifier.config_hash,
            model_type=verifier.model_type,
            dtype=str(dtype).removeprefix("torch."),
        ),
    )


def read_checkpoint(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of a checkpoint.

    Raises:
        HarnessError: a file is missing or broken, or tensors do not fit the config.
    """
    config_path, weights_path = folder / CONFIG, folder / WEIGHTS
    for path in (config_path, weights_path):
        if not path.is_file():
            raise HarnessError(
                "not a drafter checkpoint: a file is missing",
                where=path,
                rule=f"a folder with {CONFIG} and {WEIGHTS}",
                fix="correct the path, or save the drafter as safetensors",
            )
    fix = "copy or train the drafter again"
    config = read_eagle_config(read_object(config_path, fix=fix), where=str(config_path))
    with open_tensors(weights_path, fix=fix) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return config, tensors


def load_drafter(folder: Path, head: VerifierHead, dtype: torch.dtype) -> Drafter:
    """Opens a checkpoint for a verifier.

    Raises:
        HarnessError: as `read_checkpoint`; or the drafter does not fit the verifier.
    """
    config, tensors = read_checkpoint(folder)
    fits_verifier(config, head.config, where=folder)
    drafter = Drafter(config, embedding(head, dtype))
    fill(drafter, tensors, where=folder)
    return drafter.to(dtype)


def fits_verifier(config: DrafterConfig, verifier: HeadConfig, *, where: Path) -> None:
    """Refuses a drafter whose sizes or layers the verifier does not have.

    Raises:
        HarnessError: with both values.
    """
    for name, mine, theirs in (
        ("hidden size", config.target_hidden_size, verifier.hidden_size),
        ("vocabulary", config.vocab_size, verifier.vocab_size),
    ):
        if mine != theirs:
            raise HarnessError(
                f"the drafter is for a verifier of another {name}",
                where=where,
                rule=f"{verifier.verifier}: {theirs}",
                got=mine,
            )
    if max(config.aux_layers) >= verifier.num_hidden_layers:
        raise HarnessError(
            "the drafter reads layers that the verifier does not have",
            where=where,
            rule=f"{verifier.verifier} has layers 0 to {verifier.num_hidden_layers - 1}",
            got=list(config.aux_layers),
        )


def fill(drafter: Drafter, tensors: dict[str, Tensor], *, where: Path) -> None:
    """Puts stored tensors into a drafter, every one of them.

    Raises:
        HarnessError: names that are missing or unknown, or a shape that differs.
    """
    state = drafter.state_dict()
    missing, unknown = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    if missing or unknown:
        raise HarnessError(
            "the checkpoint's tensors are not those of its config",
            where=where,
            rule=f"missing: {', '.join(missing) or 'none'}",
            got=f"unknown: {', '.join(unknown) or 'none'}",
        )
    for name, value in tensors.items():
        if value.shape != state[name].shape:
            raise HarnessError(
                f"tensor {name} does not fit the config",
                where=where,
                rule=list(state[name].shape),
                got=list(value.shape),
            )
        state[name].copy_(value)
