"""Settings files: what is read, what is refused and how the error names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import Field

from eagle3.errors import HarnessError
from eagle3.settings import Settings, read_settings
from stages.params import dump_yaml, overlaid, read_params, read_section, read_yaml


class Train(Settings):
    lr: float = Field(gt=0)
    epochs: int = Field(default=1, ge=1)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", "train: {lr: 1e-4, epochs: 2}\n")
    section = read_section(path, Train, "train")
    assert section.lr == 1e-4 and section.epochs == 2


def test_dvc_reads_the_same_numbers(tmp_path: Path) -> None:
    from dvc.utils.serialize import load_yaml

    path = write(
        tmp_path / "params.yaml", "a: 1e-4\nb: 1.0e-4\nc: 010\nd: yes\ne: 1_000\nf: 1E5\ng: .5\n"
    )
    assert read_yaml(path) == load_yaml(str(path))


def test_dotted_section(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", "arms:\n  scratch: {lr: 0.5}\n")
    assert read_section(path, Train, "arms.scratch").lr == 0.5


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train: {lr: 1, epoch: 2}", ["train", "epoch", "unknown key", "epochs"]),
        ("train: {lr: -1}", ["lr = -1", "greater than 0"]),
        ("train: {lr: fast}", ["lr = 'fast'", "number"]),
        ("train: {lr: 1, epochs: 1.5}", ["epochs = 1.5"]),
        ("train: {lr: 1, epochs: '2'}", ["epochs = '2'"]),
        ("train: {epochs: 2}", ["lr", "required"]),
        ("trian: {lr: 1}", ["trian", "train", "nothing reads"]),
        ("run: {}", ["lacks a section", "train"]),
        ("train: 3", ["train", "3", "mapping"]),
        ("train: {lr: 1\nx", ["params.yaml:2"]),
        ("train: {lr: 1, lr: 2}", ["duplicate"]),
        ("- 1", ["mapping", "list"]),
    ],
)
def test_errors_name_file_key_value_and_rule(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path / "params.yaml", text)
    with pytest.raises(HarnessError) as caught:
        read_section(path, Train, "train")
    for part in ["params.yaml", *parts]:
        assert part in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="missing"):
        read_params(tmp_path / "params.yaml")


BASE = {
    "train": {"lr": 0.1, "layers": [1, 2, 3]},
    "arms": {"scratch": {"init": "x", "tokens": 1}, "finetune": {"init": "y", "tokens": 1}},
}


def test_overlay_merges_mappings_and_replaces_lists() -> None:
    new = {"train": {"layers": [2]}, "arms": {"scratch": {"lr": 5, "tokens": 7}, "finetune": None}}
    assert overlaid(BASE, new, where=Path("o")) == {
        "train": {"lr": 0.1, "layers": [2]},
        "arms": {"scratch": {"init": "x", "tokens": 7, "lr": 5}},
    }
    assert BASE["arms"]["scratch"]["tokens"] == 1  # type: ignore[index]


@pytest.mark.parametrize("new", [{"trian": {}}, {"train": 1}])
def test_overlay_refuses_what_is_no_section(new: dict[str, object]) -> None:
    with pytest.raises(HarnessError, match=r"overlay\.yaml"):
        overlaid(BASE, new, where=Path("overlay.yaml"))


def test_dumped_yaml_reads_back(tmp_path: Path) -> None:
    values = {"train": {"lr": 1e-4, "name": "1e-4", "on": True, "none": None}, "arms": {}}
    assert read_yaml(write(tmp_path / "x.yaml", dump_yaml(values))) == values


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HarnessError, match="not text") as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_a_section_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"\(section\) = 3") as caught:
        read_settings(Settings, cast(Any, 3), where="params.yaml, arms.x")
    assert "params.yaml, arms.x" in str(caught.value)


def test_diagnose_refuses_a_dtype_before_anything_is_opened(tmp_path: Path) -> None:
    from experiments.diagnose_command import run

    with pytest.raises(HarnessError, match="int8"):
        run(drafter="x", data_dir=tmp_path, verifier_path="x", documents=1, k=1, dtype="int8")
