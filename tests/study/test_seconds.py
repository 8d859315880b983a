"""A study's wall time, from the times of its trainings."""

from __future__ import annotations

from datetime import datetime, timedelta

import optuna
from optuna.trial import FrozenTrial, TrialState

from experiments.study.progress import seconds_of

START = datetime(2026, 1, 1)


def study_with(*spans: tuple[int, int]) -> optuna.Study:
    study = optuna.create_study()
    for number, (start, end) in enumerate(spans):
        study.add_trial(
            FrozenTrial(
                number=number, trial_id=number, state=TrialState.COMPLETE, value=1.0,
                datetime_start=START + timedelta(seconds=start),
                datetime_complete=START + timedelta(seconds=end),
                params={}, distributions={}, user_attrs={}, system_attrs={},
                intermediate_values={},
            )
        )  # fmt: skip
    return study


def test_trainings_side_by_side_count_once() -> None:
    # 0-10 and 4-12 overlap, 6-8 lies inside, nothing runs from 12 to 20: 12 + 5 seconds.
    assert seconds_of(study_with((0, 10), (6, 8)), study_with((20, 25), (4, 12))) == 17


def test_nothing_ran() -> None:
    assert seconds_of(study_with()) == 0
