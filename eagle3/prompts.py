"""Prompts as records: reading them from files and data sets, naming them, splitting them.

A prompt is its messages; its id is the hash of their content, so that equal prompts meet wherever
they come from, and its split follows from the id alone. Knows nothing of verifiers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.reading import read_lines
from eagle3.workspace import write_atomically

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
ROLES = ("system", "user", "assistant", "tool")
FORMS = (
    '{"messages": [{"role": ..., "content": ...}]} or '
    '{"conversations": [{"from": ..., "value": ...}]}'
)
# What a turn may hold besides role and content, for the chat template to read.
TURN_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True)
class Prompt:
    """Messages with their source: a benchmark's name, or where a training prompt came from.

    Attributes:
        messages: role and text of each turn.
        further: JSON of what each turn holds besides (`TURN_KEYS`), "" for nothing; () where no
            turn holds anything.
        tools: JSON of the tools on offer, "" for none.
    """

    messages: tuple[tuple[str, str], ...]
    source: str
    further: tuple[str, ...] = ()
    tools: str = ""

    @property
    def id(self) -> str:
        """16 hex digits of the content's SHA-256."""
        text = json.dumps(self.as_messages(), sort_keys=True, ensure_ascii=False) + self.tools
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_messages(self) -> list[dict[str, Any]]:
        """OpenAI form."""
        plain = [{"role": role, "content": content} for role, content in self.messages]
        more = self.further or ("",) * len(plain)
        return [turn | (json.loads(m) if m else {}) for turn, m in zip(plain, more, strict=True)]

    def as_tools(self) -> list[Any] | None:
        """The tools on offer, as chat templates take them."""
        return json.loads(self.tools) if self.tools else None

    def question(self) -> Prompt:
        """The messages up to the last user turn."""
        last = max(i for i, (role, _) in enumerate(self.messages) if role == "user")
        further = self.further[: last + 1]
        return replace(
            self,
            messages=self.messages[: last + 1],
            further=further if any(further) else (),
        )


def from_user(text: str, source: str) -> Prompt:
    """One user turn."""
    return Prompt((("user", text),), source)


def parse(record: Any, source: str) -> Prompt:
    """A record in OpenAI (`messages`) or ShareGPT (`conversations`) form.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not isinstance(record, Mapping):
        raise ValueError("a line is one JSON object")
    if "messages" in record:
        turns, role_key, text_key = record["messages"], "role", "content"
        roles = {role: role for role in ROLES}
    elif "conversations" in record:
        turns, role_key, text_key = record["conversations"], "from", "value"
        roles = SHAREGPT_ROLES
    else:
        raise ValueError(f"neither messages nor conversations among {', '.join(record) or 'none'}")
    if not isinstance(turns, list):
        raise ValueError("turns are a list")
    if not isinstance(source, str):
        raise ValueError(f"source is a text, not {source!r}")
    tools = record.get("tools") or []
    if not isinstance(tools, list):
        raise ValueError("tools are a list")
    messages, further = [], []
    for turn in turns:
        if isinstance(turn, Mapping) and turn.get("tool_calls") and turn.get(text_key) is None:
            turn = {**turn, text_key: ""}  # a call without words
        if not isinstance(turn, Mapping) or not isinstance(turn.get(text_key), str):
            raise ValueError(f"a turn has a text under {text_key}")
        if not isinstance(turn.get(role_key), str) or turn[role_key] not in roles:
            raise ValueError(f"{role_key} is one of {', '.join(roles)}, not {turn.get(role_key)!r}")
        try:
            turn[text_key].encode()
        except UnicodeEncodeError as error:
            # JSON can name half a character; no file can hold it.
            raise ValueError(f"a text is not Unicode: {error}") from None
        messages.append((roles[turn[role_key]], turn[text_key]))
        more = {key: turn[key] for key in TURN_KEYS if turn.get(key)}
        further.append(json.dumps(more, sort_keys=True, ensure_ascii=False) if more else "")
    if not any(role == "user" and text.strip() for role, text in messages):
        raise ValueError("no user turn with text in it")
    return Prompt(
        tuple(messages),
        source,
        tuple(further) if any(further) else (),
        json.dumps(tools, sort_keys=True, ensure_ascii=False) if tools else "",
    )


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a JSONL file, in OpenAI messages or ShareGPT form.

    Their source is the record's own `source`, or the file's name.

    Raises:
        HarnessError: names file and line; or the file has no prompt.
    """
    prompts = []
    for number, record in read_lines(path):
        try:
            own = record.get("source", path.stem) if isinstance(record, Mapping) else path.stem
            prompts.append(parse(record, own))
        except ValueError as error:
            raise HarnessError(
                "a line is not a prompt",
                where=f"{path}:{number}",
                rule=FORMS,
                got=error,
                fix="correct the line, or take it out",
            ) from None
    if not prompts:
        raise HarnessError(
            "a file has no prompts",
            where=path,
            rule="one JSON object a line",
            got="no line",
            fix="a file with prompts",
        )
    return prompts


def read_dataset(name: str, split: str) -> Iterator[Prompt]:
    """Prompts of a Hugging Face data set with a `messages` or `conversations` column.

    Raises:
        HarnessError: it cannot be loaded, or a row is in neither form.
    """
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        for number, row in enumerate(rows):
            try:
                yield parse(row, name)
            except ValueError as error:
                raise HarnessError(
                    "a row is not a prompt",
                    where=f"{name}, row {number}",
                    rule=FORMS,
                    got=error,
                    fix="another data set, or a .jsonl of its rows in one of these forms",
                ) from None
    except HarnessError:
        raise
    except Exception as error:
        raise HarnessError(
            "a data set cannot be read",
            where=f"{name}, split {split}",
            rule="a .jsonl file that exists, or the name of a Hugging Face data set",
            got=error,
            fix="correct prompts.source and prompts.dataset_split, or give a .jsonl of its rows",
        ) from None


def distinct(prompts: Iterable[Prompt], *, without: frozenset[str] = frozenset()) -> list[Prompt]:
    """First of each id, in order, leaving out ids in `without`."""
    kept: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.id not in without:
            kept.setdefault(prompt.id, prompt)
    return list(kept.values())


def is_dev(prompt_id: str, share: float) -> bool:
    """Whether a prompt belongs to dev: a property of its id, whatever other prompts there are."""
    return int(prompt_id[:12], 16) < share * 16**12


def dev_and_train(prompts: Iterable[Prompt], dev_share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Dev and training prompts, by their question: its other answers stay on the same side."""
    dev: list[Prompt] = []
    train: list[Prompt] = []
    for prompt in prompts:
        (dev if is_dev(prompt.question().id, dev_share) else train).append(prompt)
    return dev, train


def write_prompts(path: Path, prompts: Iterable[Prompt], split: str) -> None:
    """Writes `{id, messages, source, split}` lines, sorted by id."""
    lines = [
        json.dumps(
            {
                "id": prompt.id,
                "messages": prompt.as_messages(),
                **({"tools": tools} if (tools := prompt.as_tools()) else {}),
                "source": prompt.source,
                "split": split,
            },
            ensure_ascii=False,
        )
        for prompt in sorted(prompts, key=lambda prompt: prompt.id)
    ]
    write_atomically(path, "".join(line + "\n" for line in lines))
