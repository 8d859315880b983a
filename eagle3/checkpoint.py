"""Drafter checkpoints: a folder of `model.safetensors` and `config.json`.

In EAGLE's layout, which SGLang and vLLM serve and which, in float32, training keeps; or in that of
the package speculators, which vLLM serves too. Written in either, read in both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.draft_map import read_map
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import HarnessError
from eagle3.formats.eagle import eagle_config, read_eagle_config
from eagle3.formats.published import SPECULATORS, read_published
from eagle3.formats.published_tensors import refuse_quantised
from eagle3.formats.speculators import speculators_config, to_speculators
from eagle3.reading import open_tensors, read_object
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead
from eagle3.workspace import write_json

log = logging.getLogger(__name__)
WEIGHTS, CONFIG = "model.safetensors", "config.json"
DrafterFormat = Literal["eagle", "speculators"]
WHOLE = "copy or train the drafter again, whole"
DRAFTS = 3  # a step, where an engine is told nothing else


def embedding(head: VerifierHead, dtype: torch.dtype) -> Tensor:
    """The verifier's embedding as its layers see it, [V, H]."""
    embed = head.embed.to(dtype)
    return embed if head.config.embed_scale == 1.0 else embed * head.config.embed_scale


def save_drafter(
    folder: Path,
    drafter: Drafter,
    verifier: HeadConfig,
    dtype: torch.dtype,
    layout: DrafterFormat = "eagle",
    *,
    source: str | None = None,
    architectures: Sequence[str] = (),
) -> None:
    """Writes a checkpoint into a folder that is made if missing.

    Args:
        dtype: of the stored weights; id maps keep theirs.
        source: hub id or folder that readers of speculators' layout open the verifier from. None:
            its name, where that is a hub id.
        architectures: of the verifier, as its config.json names them; in the same layout.
    """
    about = {
        "verifier": verifier.verifier,
        "config_hash": verifier.config_hash,
        "model_type": verifier.model_type,
        "dtype": str(dtype).removeprefix("torch."),
    }
    tensors = drafter.state_dict()
    if layout == "eagle":
        config = eagle_config(drafter.config, **about)
    else:
        hub = verifier.verifier if verifier.verifier.count("/") == 1 else None
        config = speculators_config(
            drafter.config,
            **about,
            drafts=DRAFTS,
            source=source or hub,
            architectures=list(architectures),
        )
        tensors = to_speculators(tensors, drafter.config, drafter.embed_VH)
    stored = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous().cpu()
        for name, value in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    write_json(folder / CONFIG, config)


def read_checkpoint(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of a checkpoint in EAGLE's layout.

    Raises:
        HarnessError: a file is missing or broken, or tensors do not fit the config.
    """
    _complete(folder)
    config_path, weights_path = folder / CONFIG, folder / WEIGHTS
    config = read_eagle_config(read_object(config_path, fix=WHOLE), where=str(config_path))
    with open_tensors(weights_path, fix=WHOLE) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return config, tensors


def _complete(folder: Path) -> None:
    for path in (folder / CONFIG, folder / WEIGHTS):
        if not path.is_file():
            raise HarnessError(
                "not a drafter checkpoint: a file is missing",
                where=path,
                rule=f"a folder with {CONFIG} and {WEIGHTS}",
                fix="correct the path, or save the drafter as safetensors",
            )


def load_drafter(folder: Path, head: VerifierHead, dtype: torch.dtype) -> Drafter:
    """Opens a checkpoint, in EAGLE's layout or speculators', for a verifier.

    Raises:
        HarnessError: as `read_checkpoint`; the drafter does not fit the verifier; or its draft
            vocabulary contradicts itself.
    """
    _complete(folder)
    if SPECULATORS in read_object(folder / CONFIG, fix=WHOLE):
        published = read_published(folder, head)
        config, tensors = published.config, published.tensors
        for note in published.notes:
            log.info("%s: %s", folder, note)
    else:
        config, tensors = read_checkpoint(folder)
    fits_verifier(config, head.config, where=folder)
    drafter = Drafter(config, embedding(head, dtype))
    fill(drafter, tensors, where=folder)
    _settle_map(drafter, where=folder)
    return drafter.to(dtype)


def _settle_map(drafter: Drafter, *, where: Path) -> None:
    """Makes d2t offsets, where token ids were stored.

    Raises:
        HarnessError: d2t goes beyond the vocabulary, names a token twice, or differs from t2d.
    """
    size = drafter.config.vocab_size
    offsets, were_ids = read_map(drafter.d2t, drafter.t2d, size, where=f"{where}: d2t")
    if were_ids:
        log.info("%s: d2t holds token ids, not offsets: turned into offsets", where)
        drafter.d2t.copy_(offsets)


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
                fix="a drafter for this verifier, or the verifier of this drafter",
            )
    if min(config.aux_layers) < 0 or max(config.aux_layers) >= verifier.num_hidden_layers:
        raise HarnessError(
            "the drafter reads layers that the verifier does not have",
            where=where,
            rule=f"{verifier.verifier} has layers 0 to {verifier.num_hidden_layers - 1}",
            got=list(config.aux_layers),
            fix="a drafter for this verifier, or the right aux_layers in its config.json",
        )


def fill(drafter: Drafter, tensors: dict[str, Tensor], *, where: Path) -> None:
    """Puts stored tensors into a drafter, every one of them.

    Raises:
        HarnessError: names that are missing or unknown, a shape that differs, or quantised weights.
    """
    state = drafter.state_dict()
    missing, unknown = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    if missing or unknown:
        raise HarnessError(
            "the checkpoint's tensors are not those of its config",
            where=where,
            rule=f"missing: {', '.join(missing) or 'none'}",
            got=f"unknown: {', '.join(unknown) or 'none'}",
            fix=WHOLE,
        )
    refuse_quantised(tensors, where)
    for name, value in tensors.items():
        if value.shape != state[name].shape:
            raise HarnessError(
                f"tensor {name} does not fit the config",
                where=where,
                rule=list(state[name].shape),
                got=list(value.shape),
                fix=WHOLE,
            )
        state[name].copy_(value)
