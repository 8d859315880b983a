"""From a path, an MLflow run or a metric back to prompts and verifier, with digests and runs.

The digests come from dvc.lock, and for runs that are no longer in it from DVC's run cache; who made
them, when and from which code from the provenance files, each found by its own digest. Nothing is
computed again and no MLflow is asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from stages.closure import FIRST_PARTY
from stages.dvc_files import Cache, Entry, digest_of_listing, file_digest, read_lock

SUMMARY = Path("metrics") / "summary.json"
RECORDS = "provenance/"
SHORTEST_RUN_ID = 6  # letters


def run_ids(record: Mapping[str, Any]) -> list[str]:
    """Ids of the MLflow runs in a provenance record; runs that were never sent have none."""
    return [run["run_id"] for run in record.get("mlflow_runs", []) if run.get("run_id")]


@dataclass(frozen=True)
class Step:
    """A stage in a chain. `needs`: by path of what it read, its digest and the stage that made it
    (None: no stage did; what comes from outside of the project has a digest of stages/outside.py).
    `record`: its provenance, empty where that is lost.

    `reused`: an input was made again, with the same bytes, after this stage had run, so that DVC
    took this one's results from an earlier run; `runs` are those of that run.
    """

    stage: str
    outs: Mapping[str, str]
    needs: Mapping[str, tuple[str, str | None]]
    params: Mapping[str, Any]
    record: Mapping[str, Any] = field(default_factory=dict)
    reused: bool = False

    @property
    def runs(self) -> list[str]:
        """Ids of the stage's MLflow runs."""
        return run_ids(self.record)

    def as_json(self) -> dict[str, Any]:
        """JSON value; of the record what says who, when and from what."""
        kept = ("commit", "dirty", "experiment", "started", "seconds", "command", "mlflow_runs")
        return {
            "stage": self.stage,
            "outs": dict(self.outs),
            "needs": {
                path: {"md5": md5, "made_by": maker} for path, (md5, maker) in self.needs.items()
            },
            "params": dict(self.params),
            "reused": self.reused,
            **{name: self.record[name] for name in kept if name in self.record},
        }


@dataclass(frozen=True)
class Target:
    """What was asked for; `value` where it is a metric."""

    asked: str
    kind: str
    entry: Entry
    value: Any = None


class Lineage:
    """The project's stages, present and remembered. `lock`: of dvc.lock, where it is read already.

    Raises:
        HarnessError: nothing has run.
    """

    def __init__(self, root: Path, lock: Mapping[str, Entry] | None = None) -> None:
        self.root = root
        self.cache = Cache(root)
        self.lock = read_lock(root) if lock is None else lock
        if not self.lock:
            raise HarnessError(
                "nothing has run yet",
                where=root / "dvc.lock",
                rule="stages that have run",
                fix="make repro",
            )

    def find(self, asked: str) -> Target:
        """A stage, a path, an MLflow run's id (or its beginning) or a key of the summary.

        Raises:
            HarnessError: it is none of these.
        """
        if asked in self.lock:
            return Target(asked, "stage", self.lock[asked])
        path = Path(os.path.normpath(Path.cwd() / asked))
        if path.is_relative_to(self.root) and (made := self._maker_of(path)):
            return Target(asked, "path", made)
        if (value := self._metric(asked)) is not None:
            return Target(asked, "metric", self._metric_stage(asked), value)
        if len(asked) >= SHORTEST_RUN_ID:
            for entry in self._every:
                if any(run.startswith(asked) for run in run_ids(self.record(entry))):
                    return Target(asked, "run", entry)
        raise HarnessError(
            "nothing here has this origin",
            where="dvc.lock",
            got=asked,
            rule="a stage, a path that a stage makes, a .json in reports/, the id of an MLflow run "
            f"of this project, or a key of {SUMMARY} such as tau.scratch.all",
            fix="`dvc stage list` and `dvc metrics show` name what there is",
        )

    def chain(self, entry: Entry) -> list[Step]:
        """The stage and all before it: each stands before those that it needs."""
        found: dict[str, Entry] = {}
        needs: dict[str, dict[str, tuple[str, str | None]]] = {}

        def visit(one: Entry) -> None:
            if one.name in found:
                return
            found[one.name] = one
            needs[one.name] = {}
            for path, md5 in one.deps.items():
                if path.split("/")[0] in FIRST_PARTY or path.startswith(RECORDS):
                    continue
                maker = self._maker(path, md5)
                needs[one.name][path] = (md5, maker.name if maker else None)
                if maker is not None:
                    visit(maker)

        visit(entry)
        records = {name: self.record(one) for name, one in found.items()}
        steps = []
        for name in _ordered(entry.name, needs):
            makers = {maker for _, maker in needs[name].values() if maker}
            started = records[name].get("started", "")
            later = any(records[maker].get("started", "") > started for maker in makers)
            outs = {p: d for p, d in found[name].outs.items() if not p.startswith(RECORDS)}
            given = {p: (d, None) for p, d in records[name].get("outside", {}).items()}
            steps.append(
                Step(
                    name,
                    outs,
                    {**given, **needs[name]},
                    found[name].params,
                    records[name],
                    bool(started) and later,
                )
            )
        return steps

    def record(self, entry: Entry) -> Mapping[str, Any]:
        """The provenance that belongs to these very outputs; empty where it is lost."""
        for path, md5 in entry.outs.items():
            if path.startswith(RECORDS):
                place = self.cache.object(md5) or self.root / path
                if place.is_file() and file_digest(place) == md5:
                    return dict(json.loads(place.read_text()))
        return {}

    @cached_property
    def _every(self) -> list[Entry]:
        return [*self.lock.values(), *self.cache.runs]

    def _maker_of(self, path: Path) -> Entry | None:
        asked = path.relative_to(self.root)
        for entry in self.lock.values():
            for out, whole in entry.outs.items():
                if asked == Path(out):
                    return entry
                if Path(out) in asked.parents:
                    listing = self.cache.listing(whole)
                    # Without its list, as in a fresh clone, nobody knows what is in a folder.
                    if listing is None or _part(listing, asked.relative_to(out).as_posix()):
                        return entry
        return None

    def _maker(self, path: str, md5: str) -> Entry | None:
        """Who made this path with this digest; dvc.lock's stages first."""
        for entry in self._every if md5 not in self._current else self.lock.values():
            if entry.outs.get(path) == md5:
                return entry
            for out, whole in entry.outs.items():
                if not path.startswith(f"{out}/"):
                    continue
                listing = self.cache.listing(whole)
                # Without its list, what dvc.lock has together belongs together.
                if listing is None:
                    if entry.current:
                        return entry
                elif _part(listing, path.removeprefix(f"{out}/")) == md5:
                    return entry
        return None

    @cached_property
    def _current(self) -> set[str]:
        return {md5 for entry in self.lock.values() for md5 in entry.outs.values()}

    def _metric(self, key: str) -> Any:
        path = self.root / SUMMARY
        value: Any = json.loads(path.read_text()) if path.is_file() else {}
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def _metric_stage(self, key: str) -> Entry:
        parts = key.split(".")
        for part in parts:
            for name in (part, f"evaluate@{part}"):
                if name in self.lock:
                    return self.lock[name]
        return next(entry for entry in self.lock.values() if str(SUMMARY) in entry.outs)


def _part(listing: Mapping[str, str], inner: str) -> str | None:
    if inner in listing:
        return listing[inner]
    start = f"{inner}/"
    part = {name.removeprefix(start): d for name, d in listing.items() if name.startswith(start)}
    return digest_of_listing(part) if part else None


def _ordered(first: str, needs: Mapping[str, Mapping[str, tuple[str, str | None]]]) -> list[str]:
    """Each before those that it needs."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done:
            for _, maker in needs[name].values():
                if maker:
                    visit(maker)
            done[name] = None

    visit(first)
    return list(reversed(done))
