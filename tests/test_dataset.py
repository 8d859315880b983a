"""Shards: what is read is what was written, after kills, torn files and flipped bits too."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import eagle3.shard_writer
from eagle3.dataset import Document, StatesDataset, StatesMeta
from eagle3.errors import HarnessError
from eagle3.shard_writer import ShardWriter

HIDDEN = 8
META = StatesMeta(
    verifier="tiny",
    config_hash="abc",
    engine="test",
    engine_version="1",
    aux_layers=[0, 2],
    final_hidden="post_norm",
    dtype="bfloat16",
    hidden_size=HIDDEN,
    vocab_size=100,
)
FP8 = META.model_copy(update={"codec": "fp8"})
BYTES_PER_ROW = 3 * HIDDEN * 2 + 4 + 4 + 4 + 1
both_codecs = pytest.mark.parametrize("meta", [META, FP8], ids=["none", "fp8"])


def make_document(number: int) -> Document:
    """Document `number` of `number % 5 + 3` rows; every value says where it belongs."""
    rows = number % 5 + 3
    token_ids = torch.arange(rows, dtype=torch.int32) + number
    aux = torch.full((rows, 2, HIDDEN), float(number)).bfloat16()
    aux[:, 1] += 0.5
    return Document(
        id=f"d{number}",
        source="even" if number % 2 == 0 else "odd",
        token_ids=token_ids,
        loss_mask=(token_ids % 2 == 0).to(torch.uint8),
        aux=aux,
        final=-aux[:, 0],
        verifier_top1=token_ids + 1,
        verifier_lse=token_ids / 3,
    )


def write(
    folder: Path, numbers: range, shard_rows: int = 20, meta: StatesMeta = META
) -> StatesMeta:
    width = BYTES_PER_ROW if meta.codec == "none" else 3 * (HIDDEN + 4) + 4 + 4 + 4 + 1
    writer = ShardWriter(folder, meta, shard_rows * width)
    for number in numbers:
        if f"d{number}" not in writer.done:
            writer.add(make_document(number))
    return writer.finish()


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@both_codecs
def test_reads_what_was_written(tmp_path: Path, meta: StatesMeta) -> None:
    # All numbers of a row are alike, so that fp8 loses nothing.
    meta = write(tmp_path / "a", range(17), meta=meta)
    assert (meta.documents, meta.rows) == (17, sum(n % 5 + 3 for n in range(17)))
    assert meta.supervised == sum(int(make_document(n).loss_mask.sum()) for n in range(17))
    dataset = StatesDataset.open(tmp_path / "a", verify=True)
    assert dataset.meta == meta and len(dataset) == 17
    assert dataset.ids == [f"d{n}" for n in range(17)]
    assert dataset.lengths == [n % 5 + 3 for n in range(17)]
    assert dataset.sources[:2] == ["even", "odd"]
    assert len(list((tmp_path / "a").glob("shard-*.safetensors"))) > 2
    for number, found in enumerate(dataset):
        expected = make_document(number)
        for name in ("token_ids", "loss_mask", "aux", "final", "verifier_top1", "verifier_lse"):
            torch.testing.assert_close(
                getattr(found, name), getattr(expected, name), rtol=0, atol=0
            )


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path / "a", range(3), shard_rows=1000)
    tensors = load_file(tmp_path / "a" / "shard-00000.safetensors")
    assert tensors["document"].tolist() == [0, 3, 7, 12]
    assert tensors["document"].dtype == torch.int32
    assert tensors["aux"].shape == (12, 2, HIDDEN) and tensors["aux"].dtype == torch.bfloat16
    assert tensors["aux"][7, 1, 0] == 2.5 and tensors["final"][7, 0] == -2


def test_fp8_on_disk(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path / "a", range(3), shard_rows=1000, meta=FP8)
    tensors = load_file(tmp_path / "a" / "shard-00000.safetensors")
    assert tensors["aux"].shape == (12, 2, HIDDEN)
    assert tensors["aux"].dtype == tensors["final"].dtype == torch.float8_e4m3fn
    assert tensors["aux_scale"].shape == (12, 2) and tensors["final_scale"].shape == (12,)
    assert tensors["aux_scale"][7, 1] == torch.tensor(2.5) / 448
    assert tensors["aux"][7, 1].float().tolist() == [448.0] * HIDDEN
    assert tensors["final"][7].float().tolist() == [-448.0] * HIDDEN


def test_fp8_is_decoded_when_states_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", range(4), meta=FP8)
    dataset = pickle.loads(pickle.dumps(StatesDataset.open(tmp_path / "a")))
    monkeypatch.setattr("eagle3.dataset.decode", None)
    document = dataset[3]
    assert document.token_ids.tolist() == [3, 4, 5, 6, 7, 8] and document.id == "d3"
    lean = replace(document, aux=document.token_ids, final=document.token_ids)
    assert torch.equal(lean.aux, document.token_ids)
    assert "a/shard-00000.safetensors" in Path("/proc/self/maps").read_text()
    monkeypatch.undo()
    assert document.aux is document.aux and torch.equal(document.aux, make_document(3).aux)
    cut = replace(document, aux=document.aux[:2])
    assert len(cut.aux) == 2 and torch.equal(cut.final, make_document(3).final)


def test_codecs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3), meta=FP8)
    file = tmp_path / "a" / "meta.json"
    said = json.loads(file.read_text())
    assert said["codec"] == "fp8" and said["dtype"] == "bfloat16"
    file.write_text(json.dumps(said | {"codec": "fp4"}))
    with pytest.raises(HarnessError, match=r"meta.json[\s\S]*codec[\s\S]*'none' or 'fp8'"):
        StatesDataset.open(tmp_path / "a")
    file.write_text(json.dumps(said | {"codec": "none"}))
    with pytest.raises(HarnessError, match=r"in another way[\s\S]*shard-00000[\s\S]*float8_e4m3fn"):
        StatesDataset.open(tmp_path / "a")[0]


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_a_shard_that_is_not_as_meta_and_index_say(tmp_path: Path, codec: str) -> None:
    """Each of these was once read, or ended in a traceback."""
    write(tmp_path, range(3), meta=FP8.model_copy(update={"codec": codec}))
    file, meta = tmp_path / "shard-00000.safetensors", tmp_path / "meta.json"
    said, tensors = json.loads(meta.read_text()), load_file(file)
    index = (tmp_path / "index.jsonl").read_text()

    def refused(message: str) -> None:
        with pytest.raises(HarnessError, match=rf"in another way[\s\S]*{message}"):
            StatesDataset.open(tmp_path)[0]

    for change, message in (
        ({"aux_layers": said["aux_layers"][:1]}, r"aux\w*\n[\s\S]*restore meta"),
        ({"hidden_size": HIDDEN // 2}, r"aux\w*\n[\s\S]*restore meta"),
    ):
        meta.write_text(json.dumps(said | change))
        refused(message)
    meta.write_text(json.dumps(said))
    rows = len(tensors["token_ids"])
    changes: dict[str, torch.Tensor | None] = {"final": None, "token_ids": tensors["token_ids"][1:]}
    if codec == "fp8":
        changes |= {"aux_scale": tensors["aux_scale"][1:], "final_scale": None}
    for name, changed in changes.items():
        held = {n: t for n, t in (tensors | {name: changed}).items() if t is not None}
        save_file({n: t.clone() for n, t in held.items()}, file)
        entry = json.loads(index) | {"bytes": file.stat().st_size}
        (tmp_path / "index.jsonl").write_text(json.dumps(entry) + "\n")
        got = "no such tensor" if changed is None else rf"\[{rows - 1}"
        refused(rf"{name}\n[\s\S]*got: {got}|{name}\n[\s\S]*got: \w+ \[{rows - 1}")


def test_memory_mapping_does_not_copy(tmp_path: Path) -> None:
    write(tmp_path / "a", range(4), shard_rows=1000)
    dataset = StatesDataset.open(tmp_path / "a")
    first, last = dataset[0], dataset[3]
    assert first.aux.untyped_storage().data_ptr() == last.aux.untyped_storage().data_ptr()
    assert last.aux.data_ptr() - first.aux.data_ptr() == (3 + 4 + 5) * 2 * HIDDEN * 2
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert "a/shard-00000.safetensors" in mapped.read_text()
    # A loader process gets the paths, not the states.
    assert len(pickle.dumps(dataset)) < 3000
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[3].aux, last.aux)


@pytest.mark.parametrize(
    ("target", "name", "deaths"),
    [
        (os, "fsync", 2),  # in the middle of the first shard
        (os, "fsync", 9),
        (Path, "replace", 3),  # a shard is on disk under its temporary name
        (eagle3.shard_writer, "_line", 2),  # a shard is in place, the index doesn't know it
        (ShardWriter, "add", 15),
    ],
)
@both_codecs
def test_killed_and_resumed_gives_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: object,
    name: str,
    deaths: int,
    meta: StatesMeta,
) -> None:
    write(tmp_path / "whole", range(23), meta=meta)
    killed = tmp_path / "killed"
    calls = itertools.count(1)
    real = getattr(target, name)

    def dying(*args: object, **kwargs: object) -> object:
        if next(calls) == deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(target, name, dying)
        write(killed, range(23), meta=meta)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    with pytest.raises(HarnessError, match="no finished folder"):
        StatesDataset.open(killed)
    write(killed, range(23), meta=meta)
    assert contents(killed) == contents(tmp_path / "whole")


def test_torn_leftovers_are_dropped(tmp_path: Path) -> None:
    write(tmp_path / "whole", range(23))
    torn = tmp_path / "torn"
    write(torn, range(23))
    (torn / "meta.json").unlink()
    index = torn / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 4
    index.write_bytes(b"".join(lines[:3]) + lines[3][:17])  # a line cut short
    second = torn / json.loads(lines[1])["file"]
    second.write_bytes(second.read_bytes()[:-1])  # a shard cut short
    (torn / "shard-00009.safetensors.part").write_bytes(b"half")
    kept = [item["id"] for item in json.loads(lines[0])["documents"]]
    assert ShardWriter(torn, META, 20 * BYTES_PER_ROW).done == set(kept)
    write(torn, range(23))
    assert contents(torn) == contents(tmp_path / "whole")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a", range(5))
    shard = tmp_path / "a" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    StatesDataset.open(tmp_path / "a")
    with pytest.raises(HarnessError, match=r"content has changed[\s\S]*shard-00000"):
        StatesDataset.open(tmp_path / "a", verify=True)
    shard.write_bytes(data[:-1])
    with pytest.raises(HarnessError, match="missing or damaged"):
        StatesDataset.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("meta.json", "{", "not a JSON file"),
        ("index.jsonl", "{", "one line of JSON a shard"),
        ("index.jsonl", "[1]\n", "one line of JSON a shard"),
        ("index.jsonl", "", "index and meta disagree"),
        ("index.jsonl", None, "one line of JSON a shard"),
        ("index.jsonl", '{"file": "a", "bytes": 5, "documents": []}', r"got: KeyError: 'sha256'"),
        (
            "index.jsonl",
            '{"file": "a", "bytes": 5, "sha256": "", "documents": '
            '[{"id": "a", "source": "s", "length": "3"}]}',
            r"got: ValueError: length of sample a is '3'",
        ),
        ("index.jsonl", '{"file": "a", "bytes": 5, "sha256": "", "documents": ["a"]}', "TypeError"),
    ],
)
def test_broken_descriptions_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    write(tmp_path, range(3))
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(HarnessError, match=message) as caught:
        StatesDataset.open(tmp_path)
    assert f"{tmp_path / name}" in str(caught.value) and "fix: extract again" in str(caught.value)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    shard = tmp_path / "shard-00000.safetensors"
    shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])
    with pytest.raises(HarnessError, match=rf"{shard}[\s\S]*whole safetensors"):
        StatesDataset.open(tmp_path)[0]


def test_other_states_are_not_mixed_in(tmp_path: Path) -> None:
    ShardWriter(tmp_path, META).add(make_document(0))
    with pytest.raises(HarnessError, match="differs in aux_layers, final_hidden"):
        ShardWriter(
            tmp_path, META.model_copy(update={"aux_layers": [1, 2], "final_hidden": "pre_norm"})
        )


@both_codecs
def test_samples_that_do_not_fit_are_named(tmp_path: Path, meta: StatesMeta) -> None:
    writer = ShardWriter(tmp_path, meta)
    good = make_document(1)
    fields = dict(good.__dict__)
    with pytest.raises(HarnessError, match=r"final does not fit[\s\S]*sample d1"):
        writer.add(Document(**{**fields, "final": good.final[1:]}))
    for value in ("nan", "inf"):
        spoilt = good.aux.clone()
        spoilt[2, 1, 3] = float(value)
        with pytest.raises(HarnessError, match=r"aux holds a NaN[\s\S]*sample d1"):
            writer.add(Document(**{**fields, "aux": spoilt}))
    with pytest.raises(HarnessError, match="no document to write"):
        writer.finish()


def test_states_of_another_verifier(tmp_path: Path) -> None:
    write(tmp_path / "a", range(3))
    dataset = StatesDataset.open(tmp_path / "a")
    ours = SimpleNamespace(
        verifier="tiny", config_hash="abc", hidden_size=HIDDEN, vocab_size=100, num_hidden_layers=3
    )
    dataset.check(ours)
    for name, value in (("config_hash", "abd"), ("hidden_size", 9), ("vocab_size", 101)):
        other = SimpleNamespace(**{**ours.__dict__, name: value})
        with pytest.raises(HarnessError, match=rf"do not belong together[\s\S]*{name} is {value}"):
            dataset.check(other)
    with pytest.raises(HarnessError, match="a layer that the verifier does not have"):
        dataset.check(SimpleNamespace(**{**ours.__dict__, "num_hidden_layers": 2}))
