"""MLflow's web page over the project's store, on this machine's loopback only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from eagle3.errors import HarnessError
from stages.notes import TAG
from stages.sending import asking, open_client
from stages.signals import end_with_parent
from stages.tracking import resolve_store

if TYPE_CHECKING:
    from mlflow import MlflowClient

USUAL_PORT = 5000

# A view of the runs that the page opens with: MLflow keeps it as a tag of the experiment, under the
# key that the address names.
VIEW = "eagle3"
COLUMNS = (
    *("tags.`kind`", "tags.`arm`", "metrics.`tau.all`", "metrics.`tau.mt_bench`"),
    *("metrics.`tau.human_eval`", "metrics.`speedup`", "metrics.`break_even_tau`"),
    *("metrics.`best_dev_tau`", "params.`arm.tokens`", "params.`lr`", "tags.`dvc_experiment`"),
    *("tags.`git_dirty`", "attributes.`Dataset`", "attributes.`Duration`"),
)
DESCRIPTION = """Drafters for speculative decoding, each trained and evaluated by the pipeline.

- **train ARM**: settings, curves by optimizer step, and what it was trained on, by digest.
- **evaluate ARM**: acceptance length `tau.*` on the test prompts, and speed.
- **report**: the verdict, and the report itself under Artifacts.
- **study NAME**: a search; its trainings are the rows below it, its pictures are under Artifacts.
- **Models**, in the menu: each checkpoint once, with its τ and its speed.

`eagle3 lineage RUN_ID` says which prompts, verifier, code and settings stand behind a run.
"""


def free_port(wanted: int | None) -> int:
    """The port wanted; without a wish the usual one, or any that is free.

    Raises:
        HarnessError: the port wanted is taken.
    """
    for port in (wanted,) if wanted is not None else (USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise HarnessError(
        "port is taken",
        where=f"127.0.0.1:{wanted}",
        rule="a port that nobody listens at",
        got=wanted,
        fix="another --port, or none to get a free one",
    )


def describe(client: MlflowClient, experiment: str) -> None:
    """What the experiment's page says of itself, and the columns that it opens with."""
    view = {"selectedColumns": list(COLUMNS), "orderByKey": "attributes.start_time"}
    tags = {
        TAG: DESCRIPTION,
        "mlflow.experimentKind": "custom_model_development",
        f"mlflow.sharedViewState.{VIEW}": json.dumps(view),
    }
    for name, value in tags.items():
        client.set_experiment_tag(experiment, name, value)


def first_page(experiment: str) -> str:
    """Where to begin: the runs, with our columns, beside the models.

    The experiment's own first page is an overview of traces, which are empty, and the menu of a new
    browser speaks of agents and prompts until a page asks for the one of trainings.
    """
    asked = {"viewStateShareKey": VIEW, "workflowType": "machine_learning"}
    return f"experiments/{experiment}/runs?{urlencode(asked)}"


def serve(root: Path, port: int | None) -> int:
    """Serves until interrupted; returns MLflow's exit code.

    Raises:
        HarnessError: the store is damaged, or the port is taken.
    """
    store = resolve_store(root)
    if store.database is None:
        print(f"the store is a server already: {store.uri}")
        return 0
    with asking(store):
        client, experiment = open_client(store)  # makes a fresh one before several workers meet it
        describe(client, experiment)
    chosen = free_port(port)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(chosen), "--workers", "1", "--backend-store-uri", store.uri]
    command += ["--default-artifact-root", (store.artifacts or root).as_uri()]
    page = f"http://127.0.0.1:{chosen}/#/{first_page(experiment)}"
    print(f"MLflow over {store.database}: {page}  (Ctrl-C ends it)", flush=True)
    child = subprocess.Popen(
        command,
        preexec_fn=partial(end_with_parent, os.getpid()),
        start_new_session=True,
        # No queue of background jobs: nothing here uses one, and each is a process more.
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )

    def stop(*_: object) -> None:
        os.killpg(child.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return child.wait()
