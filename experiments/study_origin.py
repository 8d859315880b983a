"""A study's run as the first step of a chain: DVC does not know it, but made what it read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.dvc_files import Entry
from stages.lineage import Lineage, Step, Target
from stages.provenance import moment
from stages.sending import DATA_TAG, asking, open_client
from stages.tracking import resolve_store

RUN_ID = re.compile(r"[0-9a-f]{32}")
COMMIT = "mlflow.source.git.commit"
SAME_NAME = ("python", "platform", "processor", "threads", "seed", "lock")


def study_run(root: Path, lineage: Lineage, run_id: str) -> tuple[Target, list[Step]] | None:
    """The run, and the chains of the stages whose outputs it read; None where MLflow has no such
    run. A run without data tags stands alone.

    Raises:
        HarnessError: the store does not answer.
    """
    store = resolve_store(root)
    if not RUN_ID.fullmatch(run_id) or not store.is_there:
        return None
    from mlflow import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    with asking(store):
        client, _ = open_client(store)
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise
    tags, name = run.data.tags, run.info.run_name
    read = {
        key.removeprefix(DATA_TAG): value for key, value in tags.items() if key.startswith(DATA_TAG)
    }
    needs, before = behind(lineage, dict(sorted(read.items())))
    step = Step(
        name,
        {},
        needs,
        {key: _value(value) for key, value in run.data.params.items()},
        {
            "commit": tags.get(COMMIT),
            "dirty": tags.get("git_dirty") == "true",
            "started": moment(run.info.start_time / 1000),
            "mlflow_runs": [{"name": name, "run_id": run_id}],
            **{key: _value(tags[key]) for key in SAME_NAME if key in tags},
        },
    )
    target = Target(run_id, "run", Entry(name, "", read, {}, step.params, current=False))
    return target, [step, *before]


def behind(
    lineage: Lineage, read: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str | None]], list[Step]]:
    """What stands behind paths that something outside DVC read.

    Args:
        read: DVC's digests by path.

    Returns:
        digest and maker of each path, as `Step.needs` has them, and the chains of all makers as
        one: each stage once, before those that it needs.
    """
    makers = {path: _maker_of(lineage, path, digest) for path, digest in read.items()}
    needs = {path: (read[path], maker.name if maker else None) for path, maker in makers.items()}
    before: dict[str, Step] = {}
    for maker in filter(None, makers.values()):
        for one in reversed(lineage.chain(maker)):
            before.setdefault(one.stage, one)
    return needs, list(reversed(before.values()))


def _maker_of(lineage: Lineage, path: str, digest: str) -> Entry | None:
    """The stage, present or remembered, that made a path with this digest."""
    entries = [*lineage.lock.values(), *lineage.cache.runs]
    return next((entry for entry in entries if entry.outs.get(path) == digest), None)


def _value(text: str) -> Any:
    """MLflow keeps words: a number or a list becomes one again."""
    try:
        return json.loads(text)
    except ValueError:
        return text
