"""Drafter checkpoints: a folder of `model.safetensors` and `config.json`.

In EAGLE's layout, which SGLang and vLLM serve and which, in float32, training keeps; or in that of
the package speculators, which vLLM serves too. Written in either, read in both.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.formats.eagle import eagle_config
from eagle3.formats.published import read_published
from eagle3.formats.published_tensors import WHOLE
from eagle3.formats.speculators import speculators_config, to_speculators
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead
from eagle3.workspace import write_json

log = logging.getLogger(__name__)
WEIGHTS, CONFIG = "model.safetensors", "config.json"
DrafterFormat = Literal["eagle", "speculators"]
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


def load_drafter(folder: Path, head: VerifierHead, dtype: torch.dtype) -> Drafter:
    """Opens a checkpoint, in EAGLE's layout or speculators', for a verifier. What was filled in or
    left out is logged the first time.

    Raises:
        HarnessError: as `read_published`, tensors that are not those of its config, or no head for
            a part of the vocabulary: finetuning can start without, engines serve nothing then.
    """
    published = read_published(folder, head)
    config = published.config
    if not published.own_head and config.draft_vocab_size != config.vocab_size:
        raise HarnessError(
            "the checkpoint has no head for its draft vocabulary",
            where=folder,
            rule=f"lm_head.weight, {config.draft_vocab_size} rows",
            got="missing: lm_head.weight",
            fix=WHOLE,
        )
    for note in published.notes:
        _tell(folder, note)
    drafter = Drafter(config, embedding(head, dtype))
    fill(drafter, published.tensors, where=folder)
    return drafter.to(dtype)


@functools.cache  # an evaluation opens its drafter four times, in several dtypes
def _tell(folder: Path, note: str) -> None:
    log.info("%s: %s", folder, note)


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
            fix=WHOLE,
        )
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
