"""Folders of hidden states that other programs wrote, sample by sample, as they stand there.

speculators v1 (`data_{i}.pt`), later speculators (`hs_{i}.safetensors` beside an arrow data set)
and SpecForge (`rows_*/data_{i}.ckpt`, with its --compress `.ckpt.gz`: a run that is taken up again
with or without it leaves both). Knows where each keeps what. What none of them says (which layers,
before or after the last norm, what the mask is aligned to) is `eagle3.conventions`' matter.

Shape suffixes: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.formats.foreign_samples import SAMPLE, RawSample, check_sample, kind_of, tensor_of
from eagle3.pickles import load_pickled
from eagle3.reading import open_tensors, read_object

V1, ARROW, SPECFORGE = "speculators v1", "speculators (arrow)", "SpecForge"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForeignFolder:
    """A folder of one of the formats.

    Attributes:
        kind: the format's name.
        paths: a file a sample, by number.
        says: what the folder itself says of its layers, for people to read.
    """

    kind: str
    folder: Path
    paths: Sequence[Path]
    says: str

    @cached_property
    def names(self) -> list[str]:
        """A name for each sample, the same wherever the folder lies."""
        return [path.name.split(".")[0] for path in self.paths]

    def only(self, chosen: Sequence[int]) -> ForeignFolder:
        """The same folder with some of its samples."""
        return replace(self, paths=[self.paths[index] for index in chosen])

    def read(self, index: int) -> RawSample:
        """One sample; tensors are mapped where the format allows it.

        Raises:
            HarnessError: names the file of what cannot be used.
        """
        path = self.paths[index]
        sample = _READERS[self.kind](self, path)
        check_sample(sample, path)
        return sample

    @cached_property
    def arrow(self) -> Any:
        """The data set that holds loss masks beside `hs_{i}.safetensors`."""
        import datasets

        folder = self.folder
        try:
            table = datasets.load_from_disk(str(folder))
        except (FileNotFoundError, ValueError, OSError, LookupError, TypeError) as error:
            raise HarnessError(
                "hidden states without the data set that they were made from",
                where=folder,
                rule="an arrow data set (save_to_disk) with input_ids and loss_mask in this folder",
                got=f"{type(error).__name__}: {error}".split("\n")[0][:200],
                fix="give the folder that the data was prepared into, its hidden_states in it",
            ) from None
        missing = {"input_ids", "loss_mask"} - set(getattr(table, "column_names", ()))
        if missing:
            raise HarnessError(
                "the data set beside the hidden states lacks columns",
                where=folder, rule="input_ids and loss_mask",
                got=f"no {' and no '.join(sorted(missing))}",
                fix="give the folder that the data was prepared into, its hidden_states in it",
            )  # fmt: skip
        return table.with_format("torch")


def open_foreign(folder: Path) -> ForeignFolder | None:
    """The folder as one of the known formats, or None.

    Raises:
        HarnessError: it holds files of two formats, or two for one sample.
    """
    patterns = {
        V1: ("data_*.pt",),
        ARROW: ("hs_*.safetensors", "hidden_states/hs_*.safetensors"),
        SPECFORGE: tuple(f"{at}data_*.ckpt{gz}" for at in ("", "rows_*/") for gz in ("", ".gz")),
    }
    found = {
        kind: sorted((p for glob in globs for p in folder.glob(glob)), key=_number)
        for kind, globs in patterns.items()
    }
    kinds = [kind for kind, paths in found.items() if paths]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise HarnessError(
            "a folder holds hidden states of two formats", where=folder, rule="one format",
            got=", ".join(f"{len(found[kind])} files of {kind}" for kind in kinds),
            fix="move one of them into a folder of its own",
        )  # fmt: skip
    kind = kinds[0]
    for one, other in pairwise(found[kind]):
        if _number(one)[0] == _number(other)[0]:
            raise HarnessError(
                "two files of hidden states have one number", where=folder,
                rule="a file a sample, each with a number of its own",
                got=f"{one.relative_to(folder)} and {other.relative_to(folder)}",
                fix="remove or rename one of them",
            )  # fmt: skip
    packed = sum(path.suffix == ".gz" for path in found[kind])
    if packed:
        log.info(
            "%s: %d of %d files are in gzip, unpacked at each reading; eagle3 import does it once",
            folder, packed, len(found[kind]),
        )  # fmt: skip
    return ForeignFolder(kind, folder, found[kind], _says(folder, kind, len(found[kind])))


def _number(path: Path) -> tuple[int, str]:
    digits = re.search(r"_(\d+)$", path.name.split(".")[0])
    return (int(digits[1]) if digits else -1, path.name)


def _says(folder: Path, kind: str, files: int) -> str:
    """What data_config.json names, and how its writer counted."""
    config = folder / "data_config.json"
    if kind != V1 or not config.is_file():
        return f"{kind} does not write down its layers"
    about = read_object(config, fix="correct it, or remove it: only its layer ids are quoted")
    parts = {name: about.get(name) or {} for name in ("format", "hidden_states", "data")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise HarnessError(
                "not the data_config.json of speculators", where=config, rule=f"{name}: an object",
                got=part, fix="correct it, or remove it: only its layer ids are quoted",
            )  # fmt: skip
    version = parts["format"].get("data_format_version")
    if version not in (1, None):
        raise HarnessError(
            "a version of the speculators data format that is not known", where=config,
            rule="data_format_version 1", got=version,
            fix="extract with speculators 0.3 or 0.4, or with a later one's hs_*.safetensors",
        )  # fmt: skip
    promised = parts["data"].get("num_samples")
    if promised is not None and promised != files:
        log.warning(
            "%s: %d files of samples, where %s names %s", folder, files, config.name, promised
        )
    ids = parts["hidden_states"].get("layer_ids")
    return (
        f"data_config.json names layer_ids {json.dumps(ids)}, written by speculators "
        f"{about.get('version')}: v0.3 and v0.4 counted outputs of layers, the last for the final "
        "state"
    )


def _read_v1(folder: ForeignFolder, path: Path) -> RawSample:
    data = load_pickled(path)
    ids, mask = (tensor_of(data, name, 1, path) for name in ("input_ids", "loss_mask"))
    states = data.get("hidden_states")
    if isinstance(states, Tensor) and states.dim() == 3:
        states = list(states)
    if not isinstance(states, list | tuple) or not states:
        raise HarnessError(
            "a sample lacks what its format holds", where=path,
            rule="hidden_states: a list of tensors [T, H], the final state last",
            got=kind_of(states), fix=SAMPLE,
        )  # fmt: skip
    named = {f"hidden_states[{i}]": state for i, state in enumerate(states)}
    states = [tensor_of(named, name, 2, path) for name in named]
    return RawSample(ids, mask, states[:-1], states[-1])


def _read_specforge(folder: ForeignFolder, path: Path) -> RawSample:
    data = load_pickled(path)
    final_TH, aux = (
        tensor_of(data, name, 2, path) for name in ("hidden_state", "aux_hidden_state")
    )
    size = final_TH.shape[-1]
    if not size or aux.shape[-1] % size:
        raise HarnessError(
            "aux states are not a whole number of hidden sizes wide", where=path,
            rule=f"a multiple of {size}", got=aux.shape[-1], fix=SAMPLE,
        )  # fmt: skip
    ids, mask = (tensor_of(data, name, 1, path) for name in ("input_ids", "loss_mask"))
    return RawSample(ids, mask, aux.split(size, dim=-1), final_TH)


def _read_arrow(folder: ForeignFolder, path: Path) -> RawSample:
    with open_tensors(path, fix=SAMPLE) as file:
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ids, states = tensor_of(data, "token_ids", 1, path), tensor_of(data, "hidden_states", 3, path)
    number, rows = _number(path)[0], len(folder.arrow)
    if not 0 <= number < rows:
        raise HarnessError(
            "hidden states of a sample that the data set does not have", where=path,
            rule=f"hs_0.safetensors to hs_{rows - 1}.safetensors: its {rows} rows", got=path.name,
            fix="give the folder that the data was prepared into, its hidden_states in it",
        )  # fmt: skip
    try:
        row = {name: torch.as_tensor(value) for name, value in folder.arrow[number].items()
               if name in ("input_ids", "loss_mask")}  # fmt: skip
    except (TypeError, ValueError, RuntimeError) as error:
        raise HarnessError(
            "a row of the data set beside the hidden states cannot be used",
            where=f"{folder.folder}, row {number}", rule="lists of numbers: input_ids, loss_mask",
            got=str(error).split("\n")[0][:200], fix="prepare the data again",
        ) from None  # fmt: skip
    if ids.tolist() != row["input_ids"].view(-1).tolist():
        raise HarnessError(
            "hidden states and data set hold other tokens for the same sample", where=path,
            rule=f"{len(row['input_ids'])} token ids of row {number}",
            got=f"{len(ids)} others", fix="extract the sample again, or remove its file",
        )  # fmt: skip
    if not states.shape[1]:
        raise HarnessError(
            "a sample holds no states", where=f"{path}, hidden_states",
            rule="one axis of layers, the final state last", got=list(states.shape), fix=SAMPLE,
        )  # fmt: skip
    each = states.unbind(1)
    return RawSample(ids, tensor_of(row, "loss_mask", 1, path), each[:-1], each[-1])


_READERS: dict[str, Callable[[ForeignFolder, Path], RawSample]] = {
    V1: _read_v1,
    ARROW: _read_arrow,
    SPECFORGE: _read_specforge,
}
