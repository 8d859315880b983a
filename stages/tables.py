"""Tables on a run's page in MLflow. Knows nothing of what they say."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.tracking import Tracker
from eagle3.workspace import write_json


@dataclass(frozen=True)
class Table:
    """Names of the columns, and rows of plain values."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


def log_tables(tracker: Tracker, tables: Mapping[str, Table]) -> None:
    """Logs each as `<name>.json`, in the form that MLflow's evaluation view reads.

    Call once a run: its list of tables is one tag.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, table in tables.items():
            path = Path(folder) / f"{name}.json"
            write_json(path, {"columns": list(table.columns), "data": [*map(list, table.rows)]})
            tracker.log_artifact(path)
    said = [{"path": f"{name}.json", "type": "table"} for name in tables]
    tracker.log_tags({"mlflow.loggedArtifacts": json.dumps(said)})
