"""The state of an interrupted training: written whole or not at all, newest good one first.

Tensors are safetensors, the rest JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.workspace import digest_file, write_json

log = logging.getLogger(__name__)
KEPT = 2


@dataclass(frozen=True)
class TrainingState:
    """All that the steps after `step` depend on.

    Attributes:
        step: optimizer steps done.
        tensors: parameters and optimizer moments by name.
        facts: JSON values: best step and τ, metrics so far.
    """

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def save_state(folder: Path, state: TrainingState) -> None:
    """Adds a state and forgets all but the newest two.

    Raises:
        HarnessError: it could not be written (disk full); earlier states are intact.
    """
    final = folder / f"state-{state.step:08d}"
    part = folder / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        save_file(state.tensors, part / "tensors.safetensors")
        checksum = digest_file(part / "tensors.safetensors")
        write_json(
            part / "state.json", {"step": state.step, "sha256": checksum, "facts": state.facts}
        )
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise HarnessError(
            "the training state could not be saved; the one before is intact",
            where=final,
            got=error,
            fix="make room and run the same command again",
        ) from None
    for old in sorted(folder.glob("state-*"))[:-KEPT]:
        shutil.rmtree(old)


def newest_state(folder: Path) -> TrainingState | None:
    """The newest state that is whole, if any; a torn one is passed over with a warning."""
    for found in sorted(folder.glob("state-*"), reverse=True):
        try:
            about = json.loads((found / "state.json").read_text())
            if digest_file(found / "tensors.safetensors") != about["sha256"]:
                raise ValueError("checksum differs")
            tensors = load_file(found / "tensors.safetensors")
            return TrainingState(about["step"], tensors, about["facts"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("passing over a torn training state: %s (%s)", found, error)
    return None


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """Moments and step counts by parameter name."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{names[index]}.{key}": value
        for index, values in state.items()
        for key, value in values.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for index, name in enumerate(names):
        prefix = f"optimizer.{name}."
        state[index] = {
            key.removeprefix(prefix): value.clone()
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
