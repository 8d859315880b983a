"""The states of an interrupted training, and the best weights so far: whole on disk, or not used.

Each is a folder of tensors and facts, written under another name, flushed to the disk and renamed;
its checksum is compared before it is read. Tensors are safetensors, the rest JSON: nothing is
unpickled.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.workspace import digest_file, flush_to_disk, write_json

log = logging.getLogger(__name__)
TENSORS, ABOUT = "tensors.safetensors", "about.json"


@dataclass(frozen=True)
class TrainingState:
    """All that the steps after `step` depend on.

    Attributes:
        step: optimizer steps done.
        tensors: parameters and optimizer moments by name, whole whatever the number of ranks.
        facts: JSON values: best step and τ, metrics so far.
    """

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def save_state(folder: Path, state: TrainingState, keep_last: int) -> None:
    """Adds a state; forgets all but the newest `keep_last`, and best weights that none of them
    names.

    Raises:
        HarnessError: it could not be written (disk full); earlier states are intact.
    """
    _write(_state(folder, state.step), state.tensors, {"step": state.step, "facts": state.facts})
    states = sorted(folder.glob("state-*"))
    for old in states[:-keep_last]:
        shutil.rmtree(old)
    named = {_best_named(kept) for kept in states[-keep_last:]}
    for best in folder.glob("best-*"):
        if best not in named:
            shutil.rmtree(best)


def save_best(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Adds the weights of a step.

    Raises:
        HarnessError: as `save_state`.
    """
    _write(_best(folder, step), tensors, {"step": step})


def newest_good(folder: Path) -> int | None:
    """The step of the newest state that is whole and whose best weights are; None without one.

    One that is torn is passed over with a warning.
    """
    for found in sorted(folder.glob("state-*"), reverse=True):
        try:
            _check(found)
            if (best := _best_named(found)) is not None:
                _check(best)
            return int(found.name.removeprefix("state-"))
        except (OSError, ValueError, KeyError) as error:
            log.warning("passing over a torn training state: %s (%s)", found, error)
    return None


def load_state(folder: Path, step: int) -> TrainingState:
    """A state that `newest_good` named."""
    found = _state(folder, step)
    return TrainingState(step, load_file(found / TENSORS), _about(found)["facts"])


def load_best(folder: Path, step: int) -> dict[str, Tensor]:
    """The best weights.

    Raises:
        HarnessError: they are gone or damaged.
    """
    found = _best(folder, step)
    try:
        _check(found)
        return load_file(found / TENSORS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise HarnessError(
            "the best weights of this training cannot be read",
            where=found,
            rule="whole, as they were written",
            got=error,
            fix="run the same command again: it goes on from before they were written",
        ) from None


def _state(folder: Path, step: int) -> Path:
    return folder / f"state-{step:08d}"


def _best(folder: Path, step: int) -> Path:
    return folder / f"best-{step:08d}"


def _best_named(state: Path) -> Path | None:
    """The best weights that a state goes on from, None before the first evaluation."""
    facts = _about(state)["facts"]
    return None if facts["best_tau"] is None else _best(state.parent, facts["best_step"])


def _about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / ABOUT).read_text())


def _check(folder: Path) -> None:
    if digest_file(folder / TENSORS) != _about(folder)["sha256"]:
        raise ValueError(f"{folder / TENSORS}: checksum differs")


def _write(final: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        save_file(dict(tensors), part / TENSORS)
        flush_to_disk(part / TENSORS)
        write_json(part / ABOUT, {**about, "sha256": digest_file(part / TENSORS)})
        flush_to_disk(part)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        flush_to_disk(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise HarnessError(
            "the training state could not be saved; the one before is intact",
            where=final,
            got=error,
            fix="make room and run the same command again",
        ) from None
