"""What a study found, as the JSON that is kept in git and that the report draws.

Reads the store; knows nothing of how trials are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from experiments.study.progress import seconds_of
from experiments.study.search import Search, best_trial, default_trial
from experiments.study.store import SLOT, finished, study_digest


def summary(
    searches: Sequence[Search], *, compare: Mapping[str, Any] | None, seconds: float, limited: bool
) -> dict[str, Any]:
    """`seconds`, per arm what was tried and found, and the comparison.

    Args:
        seconds: wall time of the comparison, added to the search's.
        limited: the outer limit in wall time ended the search.
    """
    study = searches[0].bench.study
    return {
        "study": study.name,
        "digest": {search.arm.name: study_digest(search.study) for search in searches},
        "seconds": round(seconds_of(*(search.study for search in searches)) + seconds, 1),
        "wall_limit_reached": limited,
        "cost": study.cost,
        "arms": {search.arm.name: arm_summary(search) for search in searches},
        "compare": None if compare is None else dict(compare),
    }


def arm_summary(search: Search) -> dict[str, Any]:
    """One arm's search."""
    ended = finished(search.study)
    best, default = best_trial(search.study), default_trial(search.study)
    return {
        "trials": len(ended),
        "pruned": sum(trial.state == TrialState.PRUNED for trial in ended),
        "best": None if best is None else _trial(best),
        "default_tau": None if default is None else default.value,
        "best_tau": None if best is None else best.value,
        "importances": importances(search.study),
        "history": [_trial(trial) for trial in ended],
    }


def importances(study: optuna.Study) -> dict[str, float]:
    """PED-ANOVA, which keeps parameters that not every trial has; empty for too few trials."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < 4 or len({trial.value for trial in complete}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(value) for name, value in found.items()}


def _trial(trial: FrozenTrial) -> dict[str, Any]:
    about = trial.user_attrs
    return {
        "trial": about[SLOT],
        "tau": trial.value,
        "complete": trial.state == TrialState.COMPLETE,
        "share": about.get("share", 1.0),
        "params": trial.params,
        "tokens": about["tokens"],
        "cost": about["cost"],
        "seconds": about.get("run_seconds"),
    }
