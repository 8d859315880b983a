"""Folders of hidden states that other programs wrote, sample by sample, as they stand there.

speculators v1 (`data_{i}.pt`), later speculators (`hs_{i}.safetensors` beside an arrow data set)
and SpecForge (`rows_*/data_{i}.ckpt`). Knows where each keeps what. What none of them says (which
layers, before or after the last norm, what the mask is aligned to) is `eagle3.conventions`' matter.

Shape suffixes: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.pickles import load_pickled
from eagle3.reading import open_tensors, read_object

V1, ARROW, SPECFORGE = "speculators v1", "speculators (arrow)", "SpecForge"


@dataclass(frozen=True)
class RawSample:
    """One sample as stored.

    Attributes:
        token_ids, loss_mask: [T], any whole-number dtype.
        aux: one [T, H] for each aux layer, in stored order.
        final: [T, H].
    """

    token_ids: Tensor
    loss_mask: Tensor
    aux: Sequence[Tensor]
    final: Tensor


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

    def read(self, index: int) -> RawSample:
        """One sample; tensors are mapped where the format allows it.

        Raises:
            HarnessError: names the file of what cannot be used.
        """
        path = self.paths[index]
        sample = _READERS[self.kind](self, path)
        _check(sample, path)
        return sample

    @cached_property
    def arrow(self) -> Any:
        """The data set that holds loss masks beside `hs_{i}.safetensors`."""
        import datasets

        folder = self.folder
        try:
            table = datasets.load_from_disk(str(folder))
        except (FileNotFoundError, ValueError, OSError) as error:
            raise HarnessError(
                "hidden states without the data set that they were made from",
                where=folder,
                rule="an arrow data set (save_to_disk) with input_ids and loss_mask in this folder",
                got=str(error).split("\n")[0][:200],
                fix="give the folder that the data was prepared into, its hidden_states in it",
            ) from None
        missing = {"input_ids", "loss_mask"} - set(getattr(table, "column_names", ()))
        if missing:
            raise HarnessError(
                "the data set beside the hidden states lacks columns",
                where=folder, rule="input_ids and loss_mask", got=", ".join(sorted(missing)),
            )  # fmt: skip
        return table.with_format("torch")


def open_foreign(folder: Path) -> ForeignFolder | None:
    """The folder as one of the known formats, or None.

    Raises:
        HarnessError: it holds files of two formats.
    """
    patterns = {
        V1: ("data_*.pt",),
        ARROW: ("hs_*.safetensors", "hidden_states/hs_*.safetensors"),
        SPECFORGE: ("data_*.ckpt", "rows_*/data_*.ckpt"),
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
    return ForeignFolder(kind, folder, found[kind], _says(folder, kind))


def _number(path: Path) -> tuple[int, str]:
    digits = re.search(r"_(\d+)$", path.name.split(".")[0])
    return (int(digits[1]) if digits else -1, path.name)


def _says(folder: Path, kind: str) -> str:
    """What data_config.json names, and how its writer counted."""
    config = folder / "data_config.json"
    if kind != V1 or not config.is_file():
        return f"{kind} does not write down its layers"
    about = read_object(config)
    version = (about.get("format") or {}).get("data_format_version")
    if version not in (1, None):
        raise HarnessError(
            "a version of the speculators data format that is not known", where=config,
            rule="data_format_version 1", got=version,
        )  # fmt: skip
    ids = (about.get("hidden_states") or {}).get("layer_ids")
    return (
        f"data_config.json names layer_ids {json.dumps(ids)}, written by speculators "
        f"{about.get('version')}: v0.3 and v0.4 counted outputs of layers, the last for the final "
        "state"
    )


def _read_v1(folder: ForeignFolder, path: Path) -> RawSample:
    data = load_pickled(path)
    _need(data, ("input_ids", "hidden_states", "loss_mask"), path)
    states = data["hidden_states"]
    return RawSample(data["input_ids"], data["loss_mask"], states[:-1], states[-1])


def _read_specforge(folder: ForeignFolder, path: Path) -> RawSample:
    data = load_pickled(path)
    _need(data, ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"), path)
    final_TH, aux = data["hidden_state"].squeeze(0), data["aux_hidden_state"].squeeze(0)
    size = final_TH.shape[-1]
    if aux.shape[-1] % size:
        raise HarnessError(
            "aux states are not a whole number of hidden sizes wide", where=path,
            rule=f"a multiple of {size}", got=aux.shape[-1],
        )  # fmt: skip
    ids, mask = data["input_ids"].view(-1), data["loss_mask"].view(-1)
    return RawSample(ids, mask, aux.split(size, dim=-1), final_TH)


def _read_arrow(folder: ForeignFolder, path: Path) -> RawSample:
    with open_tensors(path, fix="write or copy it again, or remove it") as file:
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    _need(data, ("token_ids", "hidden_states"), path)
    row = folder.arrow[_number(path)[0]]
    ids = data["token_ids"].view(-1)
    if ids.tolist() != row["input_ids"].view(-1).tolist():
        raise HarnessError(
            "hidden states and data set hold other tokens for the same sample", where=path,
            rule=f"{len(row['input_ids'])} token ids of row {_number(path)[0]}",
            got=f"{len(ids)} others", fix="extract the sample again, or remove its file",
        )  # fmt: skip
    states = data["hidden_states"].unbind(1)
    return RawSample(ids, row["loss_mask"].view(-1), states[:-1], states[-1])


_READERS: dict[str, Callable[[ForeignFolder, Path], RawSample]] = {
    V1: _read_v1,
    ARROW: _read_arrow,
    SPECFORGE: _read_specforge,
}


def _need(data: dict[str, Any], names: Sequence[str], path: Path) -> None:
    if missing := [name for name in names if name not in data]:
        raise HarnessError(
            "a sample lacks what its format holds", where=path, rule=", ".join(names),
            got=f"no {', '.join(missing)}; there are {', '.join(map(str, data)) or 'none'}",
        )  # fmt: skip


def _check(sample: RawSample, path: Path) -> None:
    rows = len(sample.token_ids)
    shapes = [list(state.shape) for state in (*sample.aux, sample.final)]
    wanted = [rows, sample.final.shape[-1]]
    if not sample.aux or any(shape != wanted for shape in shapes):
        raise HarnessError(
            "states and tokens of a sample differ in number, so nobody can say which belongs where",
            where=path,
            rule=f"{rows} tokens, and one aux state or more of {wanted}",
            got=", ".join(map(str, shapes)),
            fix="remove the sample's file, or extract it again without prefix cache and chunks",
        )
    if len(sample.loss_mask) != rows:
        raise HarnessError(
            "loss mask and tokens of a sample differ in number", where=path, rule=rows,
            got=len(sample.loss_mask), fix="remove the sample's file, or prepare it again",
        )  # fmt: skip
