"""Where a study's trainings come from, beside their MLflow runs: code, machine, data.

The same tags and the same file of what was not committed as a stage's run has
(stages/provenance.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3.tracking import Tracker
from experiments.evidence import evidence
from experiments.study.bench import Bench, code_digests
from experiments.study.store import FACTS
from experiments.study.tracking import PARENT, run_name
from stages import provenance
from stages.sending import data_tags


def tell_origin(tracker: Tracker, bench: Bench, *studies: Any, threads: int) -> None:
    """Says what stands behind the trainings of some Optuna studies.

    Data is named with DVC's digests, as far as DVC made it.
    """
    about = describe(bench, threads)
    tracker.log_tags(provenance.as_tags(about) | data_tags(data(bench, *studies)))
    provenance.log_diff(tracker, about)


def describe(bench: Bench, threads: int) -> dict[str, Any]:
    """Code and machine."""
    return _describe(bench.root, threads, bench.run.seed)


@functools.cache  # a process goes on with the code that it began with
def _describe(root: Path, threads: int, seed: int) -> dict[str, Any]:
    return provenance.describe(root, threads=threads, seed=seed)


def data(bench: Bench, *studies: Any) -> dict[str, str]:
    """DVC's digests of what some Optuna studies read, by path."""
    read = [path for study in studies for path in _read(study.user_attrs[FACTS])]
    return provenance.input_digests(bench.root, read)


def _read(facts: Mapping[str, Any]) -> Iterator[Path]:
    """Paths whose digests a study keeps, at whatever depth of its facts."""
    for name, value in facts.items():
        if name == "data":
            yield from map(Path, value)
        elif isinstance(value, Mapping):
            yield from _read(value)


def evidence_of(
    bench: Bench, *studies: Any, name: str, threads: int, **settings: Any
) -> dict[str, Any]:
    """What the JSON of some Optuna studies keeps of its own origin.

    Args:
        name: of the study, as its run in MLflow has it.
        settings: sections of params.yaml besides those that all studies read.
    """
    parents = {study.user_attrs.get(PARENT) for study in studies} - {None}
    read = {
        "study": bench.study.model_dump(mode="json"),
        "run": bench.run.model_dump(mode="json"),
        "evaluate": bench.evaluate.model_dump(mode="json"),
        **{name: bench.params[name] for name in ("train", "arms")},
    }
    return evidence(
        describe(bench, threads),
        inputs=data(bench, *studies),
        settings={**read, **settings},
        code=code_digests(),
        runs=[{"name": run_name(name), "run_id": run_id} for run_id in sorted(parents)],
    )
