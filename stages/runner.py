"""What all stages share: arguments, settings, threads, working folder, tracking, provenance.

A stage file has a `main(stage, args)` and calls `run_stage`. Knows nothing of any one stage.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from eagle3.errors import HarnessError
from eagle3.ranks import ALONE
from eagle3.settings import Settings, SettingsT
from eagle3.tracking import NullTracker, Tracker, flatten
from eagle3.workspace import digest, work_folder, write_json
from stages import outside, provenance
from stages.closure import code_digests
from stages.params import read_section
from stages.signals import (
    STOPPED,
    ignore_stop_signals,
    is_stop,
    stop_on_signals,
    trouble_with_disk,
)

if TYPE_CHECKING:
    from stages.tracking import MlflowTracker

QUIET = ("alembic", "mlflow", "httpx", "urllib3", "matplotlib", "filelock", "datasets")


class RunSettings(Settings):
    """How every stage runs.

    `threads` is pinned because sums on another number of threads round differently.
    `trust_remote_code` runs Python files that come with a verifier, where its model or tokenizer is
    not one of transformers' own.
    """

    threads: int = Field(ge=1)
    seed: int = Field(ge=0)
    device: str
    trust_remote_code: bool = False


class Stage:
    """One stage's run: what it may ask for, and what it leaves in provenance."""

    def __init__(self, name: str, module: str, root: Path) -> None:
        self.name = name
        self.module = module
        self.root = root
        self.params_path = root / "params.yaml"
        self.notes: dict[str, Any] = {}
        self.trackers: list[MlflowTracker] = []
        self.tags: dict[str, str] = {}
        # What provenance says of code and machine; what differs from the commit goes to every run.
        self.about: dict[str, Any] = {"diff": None}
        self.settings: dict[str, str] = {}  # digest of each section of params.yaml that was read
        self.outside: dict[str, str] = {}  # digests of what settings name from outside, by path
        self.named: list[object] = []  # values that may be paths of inputs: arguments, settings
        self._work_key: str | None = None
        self.ranks = ALONE  # a stage of several processes sets it; only their leader writes

    def section(self, model: type[SettingsT], key: str) -> SettingsT:
        """A section of params.yaml; dotted for one inside another, `"arms.scratch"`.

        Raises:
            HarnessError: names file, key, value and rule.
        """
        settings = read_section(self.params_path, model, key)
        self.named += flatten(settings.model_dump()).values()
        self.settings[key] = digest(settings.model_dump(mode="json"))
        self.outside |= outside.digests(self.root, key, settings.model_dump())
        return settings

    @cached_property
    def code(self) -> dict[str, str]:
        """Digests of the files that this stage's results come from, by path, as they were when
        first asked for: a process goes on with the code that it began with."""
        return code_digests(self.root, self.module)

    @property
    def inputs(self) -> dict[str, str]:
        """DVC's digests of the earlier outputs that arguments or settings name, by path."""
        return provenance.input_digests(self.root, self.named, self.name)

    @cached_property
    def run(self) -> RunSettings:
        """Threads, seed and device, as they were when first asked for."""
        return self.section(RunSettings, "run")

    @contextlib.contextmanager
    def work(self, key: Mapping[str, Any]) -> Iterator[Path]:
        """A folder that a killed run of the same work finds again; deleted when the block succeeds.

        Args:
            key: all that the work depends on besides code: settings and digests of the inputs. The
                digest of the stage's own code is added here.
        """
        full = {**key, "code": self.code}
        self._work_key = digest({"stage": self.name, **full})
        with work_folder(self.root, self.name, full, leads=self.ranks.leads) as folder:
            yield folder

    def tracker(self, run_name: str, tags: Mapping[str, str] | None = None) -> Tracker:
        """A run in MLflow, behind a journal; closed when the stage ends.

        Opened inside `work`, it takes up the run of a killed stage with the same key.
        """
        if not self.ranks.leads:
            return NullTracker()
        from stages.sending import data_tags
        from stages.tracking import MlflowTracker, journal_root, resolve_store

        made = MlflowTracker(
            resolve_store(self.root),
            journal_root(self.root),
            run_name=run_name,
            resume_key=self._work_key and f"{self.name}-{run_name}-{self._work_key[:16]}",
            watch=True,
            tags={**self.tags, **data_tags(self.inputs), **(tags or {})},
        )
        self.trackers.append(made)
        provenance.log_diff(made, self.about)
        return made

    def note(self, key: str, value: object) -> None:
        """Adds a JSON value to provenance, under `notes`."""
        self.notes[key] = value


def set_threads(threads: int) -> None:
    """Pins the threads of numerical libraries, loaded already or not yet."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)


def check_device(device: str, where: str = "params.yaml, run.device") -> None:
    """Refuses a device that torch does not know or this machine does not have.

    Raises:
        HarnessError: with what torch says of it.
    """
    if device == "cpu" or "torch" not in sys.modules:
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise HarnessError(
            "the device cannot be used",
            where=where,
            rule="cpu, or a device that this build of torch can use",
            got=f"{device}: {str(error).splitlines()[0]}",
            fix="cpu, or another build of torch (TORCH_PIP_ARGS of the Makefile)",
        ) from None


def set_logging() -> None:
    """Progress to stderr, without the small talk of libraries."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _finish(stage: Stage, status: str) -> list[dict[str, str | None]]:
    return [tracker.close(status) for tracker in stage.trackers]


def run_stage(
    name: str,
    main: Callable[[Stage, argparse.Namespace], None],
    add_arguments: Callable[[argparse.ArgumentParser], None],
    argv: list[str] | None = None,
) -> None:
    """Runs a stage as a program in the project's root (the current folder).

    Exits with 2 and one message for a `HarnessError`. Writes provenance only on success.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}")
    parser.add_argument("--name", default=name, help="name of the DVC stage, its @item included")
    parser.add_argument("--provenance", type=Path, help="default: provenance/<name>.json")
    add_arguments(parser)
    args = parser.parse_args(argv)
    stage = Stage(args.name, f"stages.{name}", Path.cwd())
    set_logging()
    started = time.time()
    stopped = "stopped; the same command takes up what is finished"
    try:
        try:
            stop_on_signals()
            threads = stage.run.threads
            check_device(stage.run.device)
            set_threads(threads)
            about = provenance.describe(stage.root, threads=threads, seed=stage.run.seed)
            stage.named += vars(args).values()
            stage.tags = {"dvc_stage": stage.name, **provenance.as_tags(about)}
            stage.about = about
            main(stage, args)
        except BaseException as error:
            if is_stop(error):
                ignore_stop_signals()  # a second Ctrl-C must not tear the journal
            _finish(stage, "KILLED" if is_stop(error) else "FAILED")
            raise
        stopped = (
            "stopped while MLflow took its run; the same command takes up what is finished, "
            "`eagle3 sync` sends the rest"
        )
        runs = _finish(stage, "FINISHED")
        if stage.ranks.leads:
            write_json(
                args.provenance or stage.root / "provenance" / f"{stage.name}.json",
                {
                    "stage": stage.name,
                    "seconds": round(time.time() - started, 3),
                    "started": provenance.moment(started),
                    **about,
                    "torch": provenance.torch_build(),
                    "inputs": stage.inputs,
                    "outside": stage.outside,
                    "settings": stage.settings,
                    "code": stage.code,
                    "mlflow_runs": runs,
                    "notes": stage.notes,
                },
            )
    except BaseException as error:
        if is_stop(error):
            ignore_stop_signals()
            print(f"{stage.name}: {stopped}", file=sys.stderr)
            raise SystemExit(STOPPED) from None
        known = error if isinstance(error, HarnessError) else trouble_with_disk(error)
        if known is None:
            raise
        print(f"{stage.name}: {known}", file=sys.stderr)
        raise SystemExit(2) from None
