"""Checkpoints in MLflow's list of models, each once, with what made it and how it did.

A stage cannot know the digest of what it is about to write; afterwards dvc.lock has it, so the
report stage tells the store. What lies in DVC's cache is named there, not copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.lineage import Lineage, run_ids
from stages.sending import open_client
from stages.tracking import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric, Run

log = logging.getLogger(__name__)

DIGEST_TAG = "dvc_digest"
LONGEST_PARAM = 250  # letters, of a model's parameter
TRAIN, EVALUATE = "train@", "evaluate@"


@dataclass(frozen=True)
class Model:
    """A checkpoint: name, where it lies, its digest, and the runs that trained and tested it.

    tested_on: path of the test answers.
    """

    arm: str
    path: str
    digest: str
    trained_by: str
    evaluated_by: str | None
    tested_on: str | None


def models(lineage: Lineage) -> list[Model]:
    """The checkpoints of dvc.lock whose training is known to MLflow."""
    found = []
    for name, entry in lineage.lock.items():
        if not name.startswith(TRAIN):
            continue
        arm = name.removeprefix(TRAIN)
        path, digest = next(iter(entry.outs.items()))
        tested = lineage.lock.get(f"{EVALUATE}{arm}")
        runs = run_ids(lineage.record(entry))
        tests = run_ids(lineage.record(tested)) if tested else []
        if runs:
            by = next(iter(tests), None)
            states = _argument(tested.cmd, "--states") if tested else None
            found.append(Model(arm, path, digest, runs[0], by, states))
    return found


def _argument(command: str, name: str) -> str | None:
    words = command.split()
    return words[words.index(name) + 1] if name in words else None


def results(numbers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What the report's summary says of each arm: `tau.<benchmark>`, and `speedup` where timed."""
    found = {
        arm: {f"tau.{name}": value for name, value in taus.items()}
        for arm, taus in numbers["tau"].items()
    }
    for arm, value in numbers["speedup"].items():
        found.setdefault(arm, {})["speedup"] = value
    return found


def register(store: Store, lineage: Lineage, found: Mapping[str, Mapping[str, float]]) -> int:
    """Lists the checkpoints that the store does not list yet, and says how each did where that is
    news; never raises for the store's sake.

    Args:
        found: metrics by arm, as `results` has them.

    Returns:
        how many are new.
    """
    try:
        return _register(store, lineage, found)
    except Exception as error:  # whatever a client, a driver or a network raises
        log.warning("MLflow at %s: models are not listed (%s)", store.uri, type(error).__name__)
        return 0


def _register(store: Store, lineage: Lineage, found: Mapping[str, Mapping[str, float]]) -> int:
    client, experiment = open_client(store)
    known = {
        (model.source_run_id, model.tags.get(DIGEST_TAG)): model
        for model in client.search_logged_models([experiment])
    }
    new = 0
    for model in models(lineage):
        listed = known.get((model.trained_by, model.digest))
        if listed is None:
            listed = _create(client, experiment, model)
            new += 1
        _tell(client, listed, model, found.get(model.arm, {}))
    return new


def _create(client: MlflowClient, experiment: str, model: Model) -> LoggedModel:
    from mlflow.entities import LoggedModelStatus

    run = client.get_run(model.trained_by)
    made = client.create_logged_model(
        experiment,
        name=f"drafter_{model.arm}",
        source_run_id=model.trained_by,
        tags={DIGEST_TAG: model.digest, "path": model.path, "arm": model.arm},
        params={name: value[:LONGEST_PARAM] for name, value in run.data.params.items()},
        model_type="drafter",
    )
    return client.finalize_logged_model(made.model_id, LoggedModelStatus.READY)


def _tell(
    client: MlflowClient, listed: LoggedModel, model: Model, found: Mapping[str, float]
) -> None:
    """The metrics that the store has otherwise or not at all, and the run that measured them.

    Those of the model are that run's own, under the data that it measured them on; the training's
    run has them for its row in the list of runs.
    """
    from mlflow.entities import LoggedModelInput, Metric

    trained = client.get_run(model.trained_by)
    now = int(time.time() * 1000)
    # With no run that measured them, they are the model's by way of the training's.
    alone = listed.model_id if model.evaluated_by is None else None
    metrics = [
        Metric(name, value, now, 0, model_id=alone)
        for name, value in found.items()
        if trained.data.metrics.get(name) != value
    ]
    if metrics:
        client.log_batch(model.trained_by, metrics=metrics, synchronous=True)
    if model.evaluated_by is None:
        return
    inputs = client.get_run(model.evaluated_by).inputs
    linked = {one.model_id for one in inputs.model_inputs} if inputs else set()
    if listed.model_id not in linked:
        client.log_inputs(model.evaluated_by, models=[LoggedModelInput(listed.model_id)])
    if measured := _measured(client, listed, model, found):
        client.log_batch(model.evaluated_by, metrics=measured, synchronous=True)


def _measured(
    client: MlflowClient, listed: LoggedModel, model: Model, names: Iterable[str]
) -> list[Metric]:
    """The evaluation's metrics of these names that the model does not have yet.

    They are the run's own points, so that the store, which keeps one of each value and time, adds
    nothing to the run.
    """
    from mlflow.entities import Metric

    assert model.evaluated_by is not None
    name, digest = _dataset(client.get_run(model.evaluated_by), model.tested_on)
    said = {(m.run_id, m.key, m.dataset_digest) for m in listed.metrics or []}
    return [
        Metric(
            point.key,
            point.value,
            point.timestamp,
            point.step,
            model_id=listed.model_id,
            dataset_name=name,
            dataset_digest=digest,
        )
        for key in names
        if (model.evaluated_by, key, digest) not in said
        for point in client.get_metric_history(model.evaluated_by, key)[-1:]
    ]


def _dataset(run: Run, tested_on: str | None) -> tuple[str, str] | tuple[None, None]:
    """Name and digest of that input of the run which holds the test answers."""
    for item in run.inputs.dataset_inputs if run.inputs and tested_on else ():
        name = item.dataset.name
        if tested_on == name or str(tested_on).startswith(f"{name}/"):
            return name, item.dataset.digest
    return None, None
