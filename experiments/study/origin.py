"""Where a study's trainings come from, as tags beside their MLflow runs: code, machine, data.

The same tags as a stage's run has (stages/provenance.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.study.bench import Bench
from experiments.study.store import FACTS
from stages import provenance
from stages.sending import DATA_TAG


def origin(bench: Bench, study: Any) -> dict[str, str]:
    """Tags for what an Optuna study trains.

    Data is named with DVC's digests, as far as DVC made it.
    """
    about = provenance.describe(bench.root, threads=bench.study.threads, seed=bench.run.seed)
    read = provenance.input_digests(bench.root, _read(study.user_attrs[FACTS]))
    return {
        **provenance.as_tags(about),
        **{f"{DATA_TAG}{path}": digest for path, digest in read.items()},
    }


def _read(facts: Mapping[str, Any]) -> Iterator[Path]:
    """Paths whose digests a study keeps, at whatever depth of its facts."""
    for name, value in facts.items():
        if name == "data":
            yield from map(Path, value)
        elif isinstance(value, Mapping):
            yield from _read(value)
