"""What a study says of itself on MLflow's page, in plain sentences, told anew as it goes on.

Reads the store; knows nothing of how trials are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.report import words
from eagle3.tracking import Tracker
from experiments.study.fixed import Fixed
from experiments.study.search import Search, best_trial, default_trial
from experiments.study.store import SLOT, finished
from stages.notes import TAG


@dataclass(frozen=True)
class StudyNote:
    """The description of a study's own run.

    Attributes:
        about: what is asked, and of what.
        children: where its trainings stand.
    """

    tracker: Tracker
    about: str
    children: str

    def tell(self, found: str, more: str = "") -> None:
        """The question, what is found so far, and where the trainings stand."""
        end = f"{self.children} {more}".strip()
        self.tracker.log_tags({TAG: f"{self.about}\n\n{found}\n\n{end}"})


def searched(searches: Sequence[Search]) -> str:
    """What a search looks for."""
    bench = searches[0].bench
    arms = " and ".join(search.arm.name for search in searches)
    axes = sorted({name for search in searches for name in bench.study.axes(search.arm.name)})
    return (
        f"Which settings are best for {arms}? {bench.study.trials} trials of each, over "
        f"{', '.join(axes)}; every trial has a budget of {bench.study.cost:,} supervised rows × "
        f"TTT steps and is judged by τ on {len(searches[0].arm.data.dev):,} dev answers of "
        f"{searches[0].arm.data.meta.verifier}."
    )


def best_so_far(searches: Sequence[Search]) -> str:
    """The best trial of each arm beside its present settings, and how far the search is."""
    return "\n\n".join(_best(search) for search in searches)


def _best(search: Search) -> str:
    best, default = best_trial(search.study), default_trial(search.study)
    ended = f"{len(finished(search.study))} of {search.bench.study.trials} trials ended"
    if best is None:
        return f"**{search.arm.name}**: {ended}, none of them whole."
    beside = "" if default is None else f"; present settings {default.value:.3f}"
    return (
        f"**{search.arm.name}**: dev τ {best.value:.3f} with {words.settings(best.params)} (trial "
        f"{best.user_attrs[SLOT]}){beside}; {ended}."
    )


def progress(queue: Fixed) -> str:
    """How far trainings are whose settings are given."""
    slots = {trial.user_attrs[SLOT] for trial in queue.study.get_trials(deepcopy=False)}
    return f"{len(finished(queue.study))} of {len(slots)} trainings ended."
