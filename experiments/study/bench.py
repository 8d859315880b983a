"""What all trainings of a study share: data loaded once, arms as params.yaml has them, and digests.

Knows nothing of the store or of what is tried.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3.arm import (
    ArmData,
    ArmSettings,
    Chosen,
    arm_settings,
    first_drafter,
    init_digest,
    open_states,
)
from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from eagle3.evaluate import EvaluateSettings
from eagle3.seeding import generator
from eagle3.settings import merged, read_settings
from eagle3.train_settings import TrainSettings
from eagle3.verifier_head import read_head
from eagle3.vocab import read_vocabulary
from eagle3.workspace import digest_file
from experiments.study.budget import supervised
from experiments.study.settings import StudySettings
from experiments.training_checks import refuse_without_answers
from stages import closure
from stages.params import read_params, section_values
from stages.runner import RunSettings

CODE = Path(__file__).parents[2]


@dataclass(frozen=True)
class BenchArm:
    """One arm: what it starts from and learns from, and its present settings.

    Attributes:
        changes: keys of `train` that its trainings use over the shared ones, nested.
        present: the `train` section with these over it, nested.
        supervised: supervised tokens of each training document.
        part: what part of the data that is, and the seed that drew it; None: all.
    """

    name: str
    entry: ArmSettings
    init: Path
    data: ArmData
    changes: Mapping[str, Any]
    present: Mapping[str, Any]
    supervised: list[int]
    part: tuple[float, int] | None = None

    def settings(self, values: Mapping[str, Any]) -> TrainSettings:
        """Its present settings with nested values over them."""
        return arm_settings(self.present, values, where=f"arm {self.name}")

    def on_part(self, share: float, seed: int) -> BenchArm:
        """The same arm with a share of its documents; smaller shares of a seed are in larger ones.

        Args:
            share: above 0, up to 1.
        """
        count = len(self.data.lengths)
        order = torch.randperm(count, generator=generator("part", seed)).tolist()
        chosen = sorted(order[: max(round(share * count), 1)])
        data = replace(
            self.data,
            documents=Chosen(self.data.documents, chosen),
            lengths=[self.data.lengths[index] for index in chosen],
        )
        supervised_rows = [self.supervised[index] for index in chosen]
        return replace(self, data=data, supervised=supervised_rows, part=(share, seed))


class Bench:
    """Everything loaded. Paths of params.yaml are taken from the project's root."""

    def __init__(self, root: Path, *, finetune_from: Path | None = None) -> None:
        self.root = root
        self.params_path = root / "params.yaml"
        self.params = read_params(self.params_path)
        self.run = self._section(RunSettings, "run")
        self.study = self._section(StudySettings, "study")
        self.evaluate = self._section(EvaluateSettings, "evaluate")
        self.finetune_from = finetune_from
        self._data: dict[tuple[str, str, str], ArmData] = {}
        self._arms: dict[str, BenchArm] = {}

    def arm(self, name: str) -> BenchArm:
        """An arm of params.yaml, opened at its first use.

        Raises:
            HarnessError: no such arm, or its inputs are missing or do not fit each other.
        """
        if name not in self._arms:
            self._arms[name] = self._open(name)
        return self._arms[name]

    def seeds(self, count: int) -> range:
        """Of trainings that are compared; none of them is the seed that a search uses."""
        return range(self.run.seed + 1, self.run.seed + 1 + count)

    def check_start(self, arm: BenchArm) -> None:
        """Refuses an arm without dev answers or anything to learn, or whose first weights do not
        fit.

        Raises:
            HarnessError: says what does not fit.
        """
        if not len(arm.data.dev):
            raise HarnessError(
                "a study needs dev answers to replay",
                where=arm.entry.states,
                rule="a dev folder",
                got="no dev answer",
                fix="raise prompts.dev_share and run the pipeline again",
            )
        settings = arm.settings({})
        masks = [document.loss_mask for document in arm.data.documents]
        refuse_without_answers(masks, settings.max_length)  # of which no budget is ever spent
        init_digest(arm.init)
        first_drafter(arm.init, arm.data, settings, self.run.seed, arm.entry.init_layers)

    @functools.cached_property
    def test(self) -> StatesDataset:
        """Held-out test answers.

        Raises:
            HarnessError: not extracted, or of another verifier.
        """
        arm = self.arm(next(iter(self.study.arms)))
        states = StatesDataset.open(self.root / arm.entry.states / "test")
        states.check(arm.data.head.config)
        return states

    def maker_of(self, init: Path) -> ArmSettings | None:
        """The arm of params.yaml whose training makes this checkpoint, None where none does."""
        if init.parent.resolve() != (self.root / "checkpoints").resolve():
            return None
        if init.name not in self.params["arms"]:
            return None
        return self._section(ArmSettings, f"arms.{init.name}")

    def facts(self, arm: BenchArm, *, test: bool = False) -> dict[str, Any]:
        """All that a training's result comes from besides its own settings, as digests."""
        states = self.root / arm.entry.states
        splits = ("train", "dev", *(("test",) if test else ()))
        files = [states / split / "index.jsonl" for split in splits]
        files += [self.root / arm.entry.head, self.root / arm.entry.vocab]
        data = {str(path.relative_to(self.root)): digest_file(path) for path in files}
        return {
            "data": data | {"init": init_digest(arm.init)},
            "code": code_digests(),
            "run": self.run.model_dump(),
            "torch": torch.__version__,
            "present": arm.settings({}).model_dump(mode="json"),
        }

    def _section(self, model: type[Any], key: str) -> Any:
        values = section_values(self.params, key, where=self.params_path)
        return read_settings(model, values, where=f"{self.params_path}, {key}")

    def _open(self, name: str) -> BenchArm:
        if name not in self.params["arms"]:
            raise HarnessError(
                "a study names an arm that there is not",
                where=f"{self.params_path}, study",
                rule=f"one of {', '.join(self.params['arms'])}",
                got=name,
                fix="correct the name, or add the arm under arms",
            )
        entry: ArmSettings = self._section(ArmSettings, f"arms.{name}")
        init = self.root / entry.init
        if self.finetune_from is not None and not init.is_file():
            init = self.finetune_from
        shared = section_values(self.params, "train", where=self.params_path)
        changes = merged(entry.train, self.study.train)
        where = f"{self.params_path}, arms.{name}.train and study.train over train"
        settings = arm_settings(shared, changes, where=where)
        data = self._open_data(entry)
        return BenchArm(
            name=name,
            entry=entry,
            init=init,
            data=data,
            changes=changes,
            present=merged(shared, changes),
            supervised=supervised(data.documents, settings.max_length),
        )

    def _open_data(self, entry: ArmSettings) -> ArmData:
        key = (entry.states, entry.head, entry.vocab)
        if key not in self._data:
            head_path = self.root / entry.head
            if not head_path.is_file():
                raise HarnessError(
                    "an arm's input is missing",
                    where=head_path,
                    rule="an output of the pipeline",
                    fix="run `make repro` first",
                )
            head = read_head(head_path)
            vocabulary = read_vocabulary(self.root / entry.vocab, vocab_size=head.config.vocab_size)
            self._data[key] = open_states(self.root / entry.states, head, vocabulary)
        return self._data[key]


@functools.cache  # a process goes on with the code that it began with
def code_digests() -> dict[str, str]:
    """Of every file that a trial's budget and result come from."""
    found = closure.code_digests(CODE, "experiments.study.budget", "experiments.study.training")
    return {path: digest for path, digest in found.items() if path.endswith(".py")}
