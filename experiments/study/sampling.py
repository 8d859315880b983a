"""Optuna's TPE, made repeatable: what a slot draws depends on the seed, its number and the trials
that came before it, not on which process drew how often.

So a study that was stopped and taken up draws as if it never had been.
"""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from eagle3.seeding import seed_of
from experiments.study.store import SLOT


class RepeatableSampler(BaseSampler):
    """TPE over groups of parameters that occur together, with other trials at work taken as bad.

    Args:
        startup: trials drawn at random before it learns.
    """

    def __init__(self, seed: int, startup: int) -> None:
        self._seed = seed
        self._startup = startup

    def _for(self, trial: FrozenTrial, name: str = "") -> TPESampler:
        return TPESampler(
            n_startup_trials=self._startup,
            multivariate=True,
            group=True,
            constant_liar=True,
            seed=seed_of("sampler", self._seed, trial.user_attrs.get(SLOT), name) % 2**32,
        )

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        # Asked first: groups are kept by the instance that draws from them.
        self._current = self._for(trial)
        return self._current.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._current.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        made = self._for(trial, param_name)
        return made.sample_independent(study, trial, param_name, param_distribution)
