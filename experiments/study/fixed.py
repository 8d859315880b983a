"""Slots whose settings are given: one arm, one seed, one budget, and τ on the answers named.

Used by the comparison, the calibration, the crossover map and the law of scaling. The counts of
every prompt stay with the slot, so that any statistic can be computed from the store alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState

from eagle3.acceptance import ALL
from eagle3.dataset import Document
from eagle3.errors import HarnessError
from eagle3.evaluate import check_tails
from eagle3.statistics import Counts
from eagle3.tracking import Tracker
from experiments.study.bench import Bench, BenchArm
from experiments.study.store import FACTS, Slot, open_study
from experiments.study.training import length, score, train_once
from experiments.study.work import Place, log_settings, training_words

Answers = Literal["test", "dev"]


@dataclass(frozen=True)
class Fixed:
    """An Optuna study as a queue of such trainings."""

    bench: Bench
    study: optuna.Study
    answers: Answers

    def name(self, trial: optuna.Trial) -> str:
        return str(trial.user_attrs["title"])

    def words(self, trial: optuna.Trial) -> str:
        about, arm = trial.user_attrs, self._arm(trial)
        settings = arm.settings(about["train"])
        trained = training_words(self.bench, arm, settings, about["tokens"])
        return f"{self.name(trial)}. {trained}"

    def _arm(self, trial: optuna.Trial) -> BenchArm:
        """The slot's arm, with the first weights and the part of the data that the slot has."""
        about = trial.user_attrs
        arm = self.bench.arm(about["arm"])
        if "init" in about:
            arm = replace(arm, init=self.bench.root / about["init"])
        if "part" in about:
            arm = arm.on_part(*about["part"])
        return arm

    def run(self, trial: optuna.Trial, tracker: Tracker) -> float:
        """Trains and scores."""
        about, arm = trial.user_attrs, self._arm(trial)
        settings = arm.settings(about["train"])
        seed, tokens = about["seed"], about["tokens"]
        said = self.words(trial)
        log_settings(tracker, settings, said, arm=arm.name, seed=seed, tokens=tokens)
        drafter, result = train_once(
            self.bench, arm, settings, seed=seed, tokens=tokens, tracker=tracker
        )
        documents: Sequence[Document] = self.bench.test if self.answers == "test" else arm.data.dev
        how = self.bench.evaluate
        counts = score(drafter, documents, how.k, how.dtype)
        trial.set_user_attr(
            "counts",
            [[item.id, item.benchmark, item.verify_steps, item.accepted] for item in counts],
        )
        trial.set_user_attr("dev_tau", result.best_tau)
        trial.set_user_attr("best_at", result.best_step / result.steps)
        tracker.log_metrics({f"{self.answers}_tau": length(counts)}, 0)
        return length(counts)


def check_answers(bench: Bench, arm: BenchArm, answers: Answers) -> None:
    """Refuses answers that cannot be replayed to the end.

    Raises:
        HarnessError: not extracted, of another verifier, or without tails.
    """
    documents = bench.test if answers == "test" else arm.data.dev
    check_tails(documents, bench.evaluate.k, where=answers)


def slot(
    title: str,
    arm: str,
    *,
    seed: int,
    tokens: int,
    cost: int,
    train: Mapping[str, Any],
    **more: Any,
) -> Slot:
    """One training to queue."""
    about = {"arm": arm, "seed": seed, "tokens": tokens, "cost": cost, "train": train}
    return {}, {"title": title, **about, **more}


def open_fixed(
    place: Place,
    name: str,
    facts: Mapping[str, Any],
    slots: Sequence[Slot],
    answers: Answers,
) -> Fixed:
    """The queue, made or taken up.

    Args:
        name: what comes after the study's own name.

    Raises:
        HarnessError: its store has one of that name from other data, code or settings.
    """
    bench = place.bench
    how = {
        "evaluate": {"k": bench.evaluate.k, "dtype": bench.evaluate.dtype},
        "answers": answers,
        "threads": bench.study.threads,
    }
    study = open_study(
        place.storage, place.url, f"{bench.study.name}.{name}", {**facts, **how}, slots
    )
    return Fixed(bench, study, answers)


def take_up(place: Place, name: str) -> Fixed:
    """A queue that `open_fixed` made, here or in another process, by its whole name."""
    study = optuna.load_study(study_name=name, storage=place.storage)
    return Fixed(place.bench, study, study.user_attrs[FACTS]["answers"])


def complete(study: optuna.Study, **wanted: Any) -> list[FrozenTrial]:
    """Finished slots with these attributes, by seed."""
    found = [
        trial
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if all(trial.user_attrs.get(key) == value for key, value in wanted.items())
    ]
    if broken := [trial for trial in found if "counts" not in trial.user_attrs]:
        raise HarnessError(
            "a training left the numbers, so its arm cannot be compared",
            where=", ".join(trial.user_attrs["title"] for trial in broken),
            rule="finite losses",
            fix="a lower learning rate",
        )
    return sorted(found, key=lambda trial: trial.user_attrs["seed"])


def counts_of(trials: Sequence[FrozenTrial], benchmark: str = ALL) -> Counts:
    """Counts of some trainings as arrays [seed, prompt], prompts by id."""
    rows = [
        sorted(item for item in trial.user_attrs["counts"] if benchmark in (ALL, item[1]))
        for trial in trials
    ]
    return Counts.of(
        [[item[3] for item in row] for row in rows], [[item[2] for item in row] for row in rows]
    )


def benchmarks_of(trial: FrozenTrial) -> list[str]:
    """Benchmarks by name, and all prompts together where there are several."""
    names = sorted({item[1] for item in trial.user_attrs["counts"]})
    return [*names, ALL] if len(names) > 1 else [ALL]
