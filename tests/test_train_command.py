"""`eagle3 train`: what it refuses before any work, and the arrays that people's data comes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.dataset import Document, StatesMeta
from eagle3.errors import HarnessError
from eagle3.formats.vocab_arrays import read_arrays
from eagle3.shard_writer import ShardWriter
from eagle3.verifier import VerifierSpec
from experiments import train_command
from experiments.training_data import head_kept_for_resuming, input_digests

SIZE = 6
TARGETS = [1, 2, 5]


def arrays(folder: Path, d2t: object, t2d: object) -> Path:
    folder.mkdir(exist_ok=True)
    np.save(folder / "d2t.npy", np.array(d2t), allow_pickle=True)
    np.save(folder / "t2d.npy", np.array(t2d), allow_pickle=True)
    return folder


def test_offsets_and_token_ids_are_told_apart(tmp_path: Path) -> None:
    t2d = [i in TARGETS for i in range(SIZE)]
    for d2t in (TARGETS, [1, 1, 3]):
        read = read_arrays(arrays(tmp_path, d2t, t2d), SIZE)
        assert read.target_ids.tolist() == TARGETS


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (np.array([{"a": 1}], dtype=object), [True] * SIZE, r"d2t.npy[\s\S]*without pickled"),
        ([1.5, 2.5], [True] * SIZE, r"d2t.npy[\s\S]*got: float64 \[2\]"),
        ([[1, 2]], [True] * SIZE, r"d2t.npy[\s\S]*got: int64 \[1, 2\]"),
        ([0], [True] * 3, r"another verifier[\s\S]*: t2d[\s\S]*6 tokens[\s\S]*got: 3"),
        ([0, 0], [False] * SIZE, r"without tokens[\s\S]*2 in d2t, none in t2d"),
        ([0, 0], [True, False] * 3, "disagree"),
        ([5, 1, 2], [i in TARGETS for i in range(SIZE)], r"do not ascend[\s\S]*token 5 before 1"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path: Path, d2t: object, t2d: object, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        read_arrays(arrays(tmp_path, d2t, t2d), SIZE)


def test_arrays_of_another_machine(tmp_path: Path) -> None:
    t2d = [i in TARGETS for i in range(SIZE)]
    folder = arrays(tmp_path, np.array(TARGETS, dtype=">i4"), t2d)
    assert read_arrays(folder, SIZE).target_ids.tolist() == TARGETS


def test_a_text_file_for_an_array(tmp_path: Path) -> None:
    (tmp_path / "d2t.npy").write_text("1 2 3")
    with pytest.raises(HarnessError, match=r"d2t\.npy"):
        read_arrays(tmp_path, SIZE)


@pytest.fixture
def project(tmp_path: Path, project_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_bytes((project_root / "params.yaml").read_bytes())
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(train_command, "set_threads", lambda threads: None)
    return tmp_path


def states(folder: Path, spec: VerifierSpec, config_hash: str) -> Path:
    meta = StatesMeta(
        verifier="tiny",
        config_hash=config_hash,
        engine="test",
        engine_version="1",
        aux_layers=[0, 2, 3],
        final_hidden="pre_norm",
        dtype="bfloat16",
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
    )
    writer = ShardWriter(folder, meta)
    writer.add(
        Document(
            id="a",
            source="s",
            token_ids=torch.arange(8, dtype=torch.int32),
            loss_mask=torch.ones(8, dtype=torch.uint8),
            aux=torch.zeros(8, 3, spec.hidden_size, dtype=torch.bfloat16),
            final=torch.zeros(8, spec.hidden_size, dtype=torch.bfloat16),
            verifier_top1=torch.zeros(8, dtype=torch.int32),
            verifier_lse=torch.zeros(8),
        )
    )
    writer.finish()
    return folder


def run(verifier: Path | str, data: Path, out: Path, **flags: object) -> None:
    train_command.run(verifier_path=str(verifier), data_dir=data, output_dir=out, **flags)  # type: ignore[arg-type]


def test_what_is_refused(project: Path, tiny_verifier: Path) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    mine = states(project / "mine", spec, spec.config_hash)
    theirs = states(project / "theirs", spec, "another")
    out = project / "out"
    (project / "full").mkdir()
    (project / "full" / "thesis.tex").write_text("years of work")

    def refused(message: str, *arguments: object, **flags: object) -> None:
        with pytest.raises(HarnessError, match=message):
            run(*arguments, **flags)  # type: ignore[arg-type]
        assert not out.exists()
        left = list((project / ".work").glob("**/*"))
        assert left == [], left

    refused("config.json is missing", project / "no", mine, out)
    known = r"no hidden states of a known format[\s\S]*"
    refused(known + r"none[\s\S]*no such folder", tiny_verifier, project / "none", out)
    refused(known + r"speculators v1[\s\S]*got: thesis", tiny_verifier, project / "full", out)
    refused("do not belong together", tiny_verifier, theirs, out)
    refused("nothing to start from", tiny_verifier, mine, out, finetune_from=str(project / "no"))
    refused(r"scheduler = 'cosin'[\s\S]*'cosine'", tiny_verifier, mine, out, scheduler="cosin")
    refused("holds other files[\\s\\S]*thesis.tex", tiny_verifier, mine, project / "full")
    refused("is a file", tiny_verifier, mine, project / "full" / "thesis.tex")
    refused("lies under a file", tiny_verifier, mine, project / "full" / "thesis.tex" / "out")
    assert (project / "full" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("begun", [True, False])
def test_a_head_stays_only_for_a_training_to_take_up(tmp_path: Path, begun: bool) -> None:
    """Of a large verifier it has gigabytes: half of one, too, on a disk that is full."""
    if begun:
        (tmp_path / "state-00000004").mkdir()
    for name in ("head.safetensors", "head.safetensors.part"):
        (tmp_path / name).touch()
    with pytest.raises(OSError), head_kept_for_resuming(tmp_path):
        raise OSError("full")
    assert (tmp_path / "head.safetensors").exists() == begun
    assert begun or not list(tmp_path.iterdir())


def test_other_inputs_are_other_work(project: Path, tiny_verifier: Path) -> None:
    """A killed run is taken up for the same content, whatever its path says."""
    spec = VerifierSpec.open(tiny_verifier)
    data = states(project / "mine", spec, spec.config_hash)
    before = input_digests(spec, data, None, None)
    (data / "index.jsonl").write_text((data / "index.jsonl").read_text() + "\n")
    assert input_digests(spec, data, None, None) != before


def test_of_a_vocabulary_folder_what_is_read_is_digested(
    project: Path, tiny_verifier: Path
) -> None:
    """The arrays may lie among the data: a terabyte that is not to be read for a name."""
    spec = VerifierSpec.open(tiny_verifier)
    data = states(project / "mine", spec, spec.config_hash)
    folder = arrays(project / "mapping", TARGETS, [False] * SIZE)
    before = input_digests(spec, data, folder, None)
    assert {str(folder / "d2t.npy"), str(folder / "t2d.npy")} <= set(before)
    (folder / "data_0.pt").write_bytes(b"states")
    assert input_digests(spec, data, folder, None) == before
    arrays(folder, [0, 1, 2], [False] * SIZE)
    assert input_digests(spec, data, folder, None) != before
