"""`eagle3 parity` on other programs' folders where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.formats import foreign_states
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import write_head
from tests.foreign_data import Made, make_samples, write_arrow, write_specforge, write_v1

Command = Callable[..., tuple[int, str]]
TRANSFORMERS = ("--engine", "transformers", "--dtype", "float32")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity") / "verifier"


@pytest.fixture(scope="module")
def samples(verifier: Path) -> list[Made]:
    return make_samples(verifier)


@pytest.fixture
def command(
    verifier: Path,
    samples: list[Made],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eagle3_says: Command,
) -> Command:
    """Calls it outside of any project; its exit code, and what it says."""
    monkeypatch.chdir(tmp_path)

    def call(folder: Path, *more: str, path: Path = verifier) -> tuple[int, str]:
        flags = ["--data-dir", str(folder), "--verifier-path", str(path), *more]
        return eagle3_says("parity", *flags)

    return call


@pytest.mark.parametrize("write", [write_v1, write_arrow, write_specforge])
def test_a_folder_is_checked_where_it_lies(
    write: Callable[..., Path],
    samples: list[Made],
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write(tmp_path / "data", samples)
    code, said = command(folder, *TRANSFORMERS, "--aux-layers", "0,2,4")
    assert code == 0, said
    assert "equal to transformers" in said and "on 8 samples" in said
    lines = said.splitlines()
    states = [next(line for line in lines if line.startswith(f"  aux[{i}]")) for i in range(3)]
    for line, layer in zip(states, (0, 2, 4), strict=True):
        assert f"the output of layer {layer} " in line and "error 0.00%" in line
    last = "the output of layer 4" + (" after the last norm" if write is write_specforge else "  ")
    assert any(line.startswith("  final") and last in line for line in lines)

    code, said = command(folder, *TRANSFORMERS, "--aux-layers", "0,1,4")
    assert code == 2 and "aux[1] is the output of layer 2; serving will use layer 1" in said
    assert "correct --aux-layers" in said and "meta.json" not in said
    code, said = command(folder, *TRANSFORMERS)
    assert code == 2 and "which layers its aux states come from" in said
    # Of a terabyte no more is opened than what is compared, here without an engine.
    monkeypatch.setattr("eagle3.conventions.PROBED_SAMPLES", 2)
    read: list[Path] = []
    check = foreign_states.check_sample
    monkeypatch.setattr(
        foreign_states, "check_sample", lambda s, path: (read.append(path), check(s, path))
    )
    code, said = command(folder, "--aux-layers", "0,2,4", "--documents", "3")
    assert code == 0 and "not checked against a server" in said and "next token right" in said
    assert len(set(read)) <= 4  # the first, the fifth, the last, and one between
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_what_the_data_deny_or_nobody_says(
    verifier: Path, samples: list[Made], tmp_path: Path, command: Command
) -> None:
    aux = ("--aux-layers", "0,2,4")
    moved = [dataclasses.replace(s, aux=[a.roll(-1, 0) for a in s.aux]) for s in samples]
    code, said = command(write_v1(tmp_path / "moved", moved), *TRANSFORMERS, *aux)
    assert code == 2 and "holds the state of token t + 1 in 8 of 8 documents" in said
    folder = write_v1(tmp_path / "v1", samples)
    code, said = command(folder, *aux, "--final-hidden", "post_norm")
    assert code == 2 and "deny what was said of the final states" in said
    # A head file has no template: what the mask means has to be said then.
    write_head(VerifierSpec.open(verifier), tmp_path / "head.safetensors")
    head = tmp_path / "head.safetensors"
    code, said = command(folder, *aux, path=head)
    assert code == 2 and "--mask-alignment" in said
    code, said = command(folder, *aux, "--mask-alignment", "token", path=head)
    assert code == 0 and "predicts the next tokens as declared" in said
