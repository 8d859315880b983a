"""What DVC's plots and MLflow's page show of all arms together.

Knows nothing of how either draws it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3.acceptance import acceptance_length, read_counts
from eagle3.report.data import Curve
from eagle3.tracking import Tracker
from eagle3.workspace import publish, write_atomically
from stages.tables import Table, log_tables

PLOTTED = ("dev_tau", "loss", "accuracy_0", "lr")


def write_plots(folder: Path, curves: Mapping[str, Curve]) -> None:
    """`<arm>.<metric>.csv` with columns step and the metric, for the metrics worth a plot."""
    new = folder.with_name(f".{folder.name}.new")
    for arm, curve in curves.items():
        for metric in PLOTTED:
            text = io.StringIO()
            rows = csv.writer(text, lineterminator="\n")
            rows.writerows([("step", metric), *curve.get(metric, [])])
            write_atomically(new / f"{arm}.{metric}.csv", text.getvalue())
    new.mkdir(parents=True, exist_ok=True)
    publish(new, folder)


def log_table(tracker: Tracker, counts: Sequence[Path]) -> None:
    """Acceptance length by prompt, a column an arm, as a table that MLflow's page shows.

    Prompts that every arm verified; call once a run.
    """
    arms = {path.stem: {count.id: count for count in read_counts(path)} for path in counts}
    if not arms:
        return
    rows = [
        [name, count.benchmark]
        + [acceptance_length(arm[name].accepted, arm[name].verify_steps) for arm in arms.values()]
        for name, count in next(iter(arms.values())).items()
        if all(name in arm and arm[name].verify_steps for arm in arms.values())
    ]
    log_tables(tracker, {"tau_by_prompt": Table(["prompt", "benchmark", *arms], rows)})
