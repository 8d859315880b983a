"""Checkpoints in MLflow's list of models, each once, with what made it and how it did.

A stage cannot know the digest of what it is about to write; afterwards dvc.lock has it, so the
report stage tells the store. What lies in DVC's cache is named there, not copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from stages.lineage import Lineage
from stages.sending import open_client
from stages.tracking import Store

log = logging.getLogger(__name__)

DIGEST_TAG = "dvc_digest"
LONGEST_PARAM = 250  # letters, of a model's parameter
TRAIN, EVALUATE = "train@", "evaluate@"


@dataclass(frozen=True)
class Model:
    """A checkpoint: name, where it lies, its digest, and the runs that trained and tested it."""

    arm: str
    path: str
    digest: str
    trained_by: str
    evaluated_by: str | None


def models(lineage: Lineage) -> list[Model]:
    """The checkpoints of dvc.lock whose training is known to MLflow."""
    found = []
    for name, entry in lineage.lock.items():
        if not name.startswith(TRAIN):
            continue
        arm = name.removeprefix(TRAIN)
        path, digest = next(iter(entry.outs.items()))
        tested = lineage.lock.get(f"{EVALUATE}{arm}")
        runs = [
            run["run_id"]
            for run in lineage.record(entry).get("mlflow_runs", [])
            if run.get("run_id")
        ]
        tests = lineage.record(tested).get("mlflow_runs", []) if tested else []
        if runs:
            by = next((run["run_id"] for run in tests if run.get("run_id")), None)
            found.append(Model(arm, path, digest, runs[0], by))
    return found


def register(store: Store, lineage: Lineage, taus: Mapping[str, Mapping[str, float]]) -> int:
    """Lists the checkpoints that the store does not list yet; never raises for the store's sake.

    Args:
        taus: acceptance lengths by arm and benchmark.

    Returns:
        how many are new.
    """
    try:
        return _register(store, lineage, taus)
    except Exception as error:  # whatever a client, a driver or a network raises
        log.warning("MLflow at %s: models are not listed (%s)", store.uri, type(error).__name__)
        return 0


def _register(store: Store, lineage: Lineage, taus: Mapping[str, Mapping[str, float]]) -> int:
    from mlflow.entities import LoggedModelInput, LoggedModelStatus, Metric

    client, experiment = open_client(store)
    known = {
        (model.source_run_id, model.tags.get(DIGEST_TAG))
        for model in client.search_logged_models([experiment])
    }
    new = 0
    for model in models(lineage):
        if (model.trained_by, model.digest) in known:
            continue
        run = client.get_run(model.trained_by)
        made = client.create_logged_model(
            experiment,
            name=f"drafter_{model.arm}",
            source_run_id=model.trained_by,
            tags={DIGEST_TAG: model.digest, "path": model.path, "arm": model.arm},
            params={name: value[:LONGEST_PARAM] for name, value in run.data.params.items()},
            model_type="drafter",
        )
        now = int(time.time() * 1000)
        metrics = [
            Metric(f"tau.{name}", value, now, 0, model_id=made.model_id)
            for name, value in taus.get(model.arm, {}).items()
        ]
        client.log_batch(model.trained_by, metrics=metrics, synchronous=True)
        client.finalize_logged_model(made.model_id, LoggedModelStatus.READY)
        if model.evaluated_by is not None:
            client.log_inputs(model.evaluated_by, models=[LoggedModelInput(made.model_id)])
        new += 1
    return new
