"""What every study command begins with: settings read, and the store reached.

The store is reached last, so that a command that refuses its settings leaves none behind.
"""

from __future__ import annotations

import logging
from pathlib import Path

from eagle3.settings import read_settings
from experiments.study.bench import Bench
from experiments.study.settings import StudySettings
from experiments.study.store import open_store, store_url
from experiments.study.work import Place
from stages.runner import check_device, set_logging, set_threads


def prepare(root: Path, name: str | None = None, finetune_from: Path | None = None) -> Bench:
    """Settings and threads. From here on the terminal is the study's: the library says no more of
    each training's start and end.

    Args:
        name: of the study, where it is not the one of params.yaml.
        finetune_from: checkpoint that arms with a checkpoint start from instead of their own.

    Raises:
        HarnessError: what cannot be used.
    """
    set_logging()
    logging.getLogger("eagle3").setLevel(logging.WARNING)
    bench = Bench(root, finetune_from=finetune_from)
    if name is not None:
        values = {**bench.study.model_dump(), "name": name}
        bench.study = read_settings(StudySettings, values, where="--name")
    set_threads(bench.run.threads)
    check_device(bench.run.device)
    return bench


def reach(bench: Bench, storage: str | None) -> Place:
    """The store, made if it is new.

    Raises:
        HarnessError: it cannot be reached.
    """
    url = store_url(bench.root, storage)
    return Place(bench, open_store(url, bench.study.heartbeat), url)
