"""The search of one arm: what a trial tries, when it is given up, what it is worth.

Knows nothing of workers or of who shows the progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from eagle3.drafter import Drafter
from eagle3.report import words
from eagle3.settings import merged
from eagle3.tracking import Tracker
from experiments.study.bench import Bench, BenchArm
from experiments.study.budget import tokens_for
from experiments.study.sampling import RepeatableSampler
from experiments.study.space import check_space, default_point, nested, suggest
from experiments.study.store import SLOT, open_study
from experiments.study.training import GivenUp, length, score, train_once
from experiments.study.work import Place, log_settings, training_words


@dataclass(frozen=True)
class Search:
    """One arm's Optuna study and how its slots are run."""

    bench: Bench
    arm: BenchArm
    study: optuna.Study
    answers: str = "dev"

    def name(self, trial: optuna.Trial) -> str:
        return f"{self.arm.name} trial {trial.user_attrs[SLOT]}"

    def words(self, trial: optuna.Trial) -> str:
        about = trial.user_attrs
        settings = self.arm.settings(about["train"])
        trained = training_words(self.bench, self.arm, settings, about["tokens"])
        number = f"Trial {about[SLOT]} in the search of its settings"
        drawn = words.settings(trial.params)
        return f"{trained}\n\n{number}: {drawn}; the rest as params.yaml has it."

    def run(self, trial: optuna.Trial, tracker: Tracker) -> float:
        """Trains with what is drawn; τ on all dev answers at the end."""
        bench, arm = self.bench, self.arm
        values = nested(suggest(bench.study.axes(arm.name), trial))
        settings = arm.settings(values)
        seed = bench.run.seed
        tokens, cost = tokens_for(
            bench.study.cost, arm.data.lengths, arm.supervised, settings, seed
        )
        changes = merged(arm.changes, values)
        for name, value in (("train", changes), ("tokens", tokens), ("cost", cost)):
            trial.set_user_attr(name, value)
        about = {"arm": arm.name, "seed": seed, "tokens": tokens, "cost": cost}
        log_settings(tracker, settings, self.words(trial), **about)
        steps = len(settings.plan(arm.data.lengths, seed, tokens=tokens))
        rungs = {math.ceil(steps * share): n for n, share in enumerate(bench.study.rungs)}
        few = range(min(bench.study.rung_documents, len(arm.data.dev)))
        documents = [arm.data.dev[index] for index in few]

        def at_rung(step: int, drafter: Drafter) -> None:
            if step not in rungs:
                return
            counts = score(drafter, documents, settings.dev_drafts, settings.dtype)
            tracker.log_metrics({"rung_tau": length(counts)}, step)
            # Optuna's rungs are powers of the reduction factor, whatever the shares are.
            trial.report(length(counts), bench.study.halving ** rungs[step])
            # The first ones run to the end: the sampler is to learn from whole trials.
            if trial.user_attrs[SLOT] >= bench.study.startup and trial.should_prune():
                trial.set_user_attr("share", bench.study.rungs[rungs[step]])
                raise GivenUp

        _, result = train_once(
            bench, arm, settings, seed=seed, tokens=tokens, tracker=tracker, on_step=at_rung
        )
        assert result.best_tau is not None
        return result.best_tau


def check_search(bench: Bench, arm: BenchArm) -> None:
    """Refuses a space that the arm's training could not use.

    Raises:
        HarnessError: names the axis and what is wrong with it.
    """
    check_space(bench.study.axes(arm.name), arm.present, where=_where(bench, arm))


def _where(bench: Bench, arm: BenchArm) -> str:
    return f"{bench.params_path}, study.space of {arm.name}"


def open_search(place: Place, arm: BenchArm) -> Search:
    """The arm's study, made or taken up.

    Raises:
        HarnessError: its store has one of that name from other data, code or settings.
    """
    bench, settings = place.bench, place.bench.study
    first = default_point(settings.axes(arm.name), arm.present, where=_where(bench, arm))
    study = open_study(
        place.storage,
        place.url,
        f"{settings.name}.{arm.name}",
        search_facts(bench, arm),
        [({} if slot else first, {}) for slot in range(settings.trials)],
        sampler=RepeatableSampler(settings.seed, settings.startup),
        pruner=optuna.pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=settings.halving, min_early_stopping_rate=0
        ),
    )
    return Search(bench, arm, study)


def search_facts(bench: Bench, arm: BenchArm) -> dict[str, Any]:
    """What the trials of an arm come from; how many they are is not among it."""
    shape = bench.study.model_dump(
        mode="json",
        include={"seed", "startup", "cost", "rungs", "halving", "rung_documents", "train"},
    )
    axes = bench.study.axes(arm.name)
    space = {name: axis.model_dump(mode="json", exclude_none=True) for name, axis in axes.items()}
    return {**bench.facts(arm), "search": shape, "space": space}


def default_trial(study: optuna.Study) -> FrozenTrial | None:
    """The one with the arm's present settings, once it came to its end."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return next((trial for trial in complete if trial.user_attrs[SLOT] == 0), None)


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The highest τ among trials that ran to the end; the earliest slot of equals."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not complete:
        return None
    return max(complete, key=lambda trial: (trial.value, -trial.user_attrs[SLOT]))
