"""`eagle3 verify`: whether stages still make what dvc.lock says that they made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from eagle3.errors import HarnessError
from eagle3.settings import Settings
from eagle3.workspace import locked
from experiments.differences import environment_changes
from experiments.rerun import clone, in_order, rerun
from experiments.sameness import (
    BITWISE,
    DIFFERENT,
    NOT_COMPARED,
    UNKNOWN,
    WITHIN,
    Verdict,
    compare_files,
    without_the_recorded,
)
from stages.dvc_files import (
    FOLDER,
    Cache,
    Entry,
    digest_of_listing,
    file_digest,
    folder_listing,
)
from stages.lineage import RECORDS, Lineage
from stages.params import read_section
from stages.provenance import git_state


class VerifySettings(Settings):
    """What may come out otherwise; names are `file:key`, in patterns of the shell.

    varies: never compared: times and what follows from them.
    tolerance: absolute, of numbers; all else must be equal to the bit.
    """

    varies: list[str] = Field(default_factory=list)
    tolerance: dict[str, float] = Field(default_factory=dict)

    def tolerances(self) -> dict[str, float | None]:
        """By pattern; None where nothing is compared."""
        return {**dict.fromkeys(self.varies), **self.tolerance}


@dataclass(frozen=True)
class Found:
    """One output's verdict; `path` of a file in it where that is the first that differs."""

    stage: str
    path: str
    state: str
    first: str = ""


def run(root: Path, asked: list[str], *, as_json: bool, keep: bool) -> int:
    """Runs again and compares. Returns 0 when nothing differs, 1 when something does or failed.

    Raises:
        HarnessError: nothing has run yet, or what was asked for is unknown.
    """
    lock = Lineage(root).lock
    settings = read_section(root / "params.yaml", VerifySettings, "verify")
    names = in_order(lock, select(lock, asked))
    if changed := git_state(root)["changed"]:
        print(f"not committed, so not in the clone: {', '.join(changed)}", file=sys.stderr)
    with _folder(root, keep) as place:
        project = clone(root, place)
        code = rerun(project, lock, names)
        comparison = Comparison(root, project, Cache(root), settings.tolerances())
        results = list(comparison.found(lock, names))
        first = next((found for found in results if found.state == DIFFERENT), None)
        environment = _environment(root, project, lock, first.stage if first else names[-1])
    if as_json:
        about = None if environment is None else {n: list(p) for n, p in environment.items()}
        outs = [asdict(found) for found in results]
        print(json.dumps({"exit": code, "outs": outs, "environment": about}, indent=2))
    else:
        print(as_text(results, environment, failed=code != 0))
    return 1 if code or first else 0


def select(lock: Mapping[str, Entry], asked: list[str]) -> list[str]:
    """Stages by name, by name without their arm, or by a path that they make.

    Raises:
        HarnessError: none of these.
    """
    chosen: list[str] = []
    for word in asked:
        path = os.path.normpath(word)
        found = [
            name
            for name, entry in lock.items()
            if word in (name, name.partition("@")[0])
            or any(path == out or path.startswith(f"{out}/") for out in entry.outs)
        ]
        if not found:
            raise HarnessError(
                "no stage that has run has this name or makes this path",
                where="dvc.lock",
                got=word,
                rule=f"stages: {', '.join(lock)}; or a path that one of them makes",
                fix="one of these, or no name for all stages",
            )
        chosen += found
    return chosen or list(lock)


@dataclass(frozen=True)
class Comparison:
    """What a rerun made in `project`, against what the project's folder and cache hold of it."""

    root: Path
    project: Path
    cache: Cache
    tolerances: Mapping[str, float | None]

    def found(self, lock: Mapping[str, Entry], names: list[str]) -> Iterator[Found]:
        """A verdict on every output of the stages, provenance left out, in their order."""
        for name in names:
            for path, md5 in lock[name].outs.items():
                if not path.startswith(RECORDS):
                    verdict = self._output(path, md5)
                    yield Found(name, path, verdict.state, verdict.first)

    def _output(self, path: str, md5: str) -> Verdict:
        if not (self.project / path).exists():
            return Verdict(DIFFERENT, "it was not made")
        return self._folder(path, md5) if md5.endswith(FOLDER) else self._file(path, md5)

    def _folder(self, path: str, md5: str) -> Verdict:
        """As of its first file that differs, or may; else of the first within its tolerance."""
        made = folder_listing(self.project / path)
        if digest_of_listing(made) == md5:
            return Verdict(BITWISE)
        listing = self.cache.listing(md5)
        if listing is None:
            return without_the_recorded(path, self.tolerances)
        found = Verdict(NOT_COMPARED)
        for inner in sorted({*listing, *made}):
            if inner not in made or inner not in listing:
                lacks = "made no more" if inner not in made else "new"
                return Verdict(DIFFERENT, f"{inner} is {lacks}")
            if listing[inner] == made[inner]:
                state, told = BITWISE, ""
            else:
                verdict = self._file(f"{path}/{inner}", listing[inner])
                state, told = verdict.state, f"{inner}: {verdict.first}"
            if state in (DIFFERENT, UNKNOWN):
                return Verdict(state, told)
            if state == WITHIN and found.state != WITHIN:
                found = Verdict(WITHIN, told)
            elif state == BITWISE and found.state == NOT_COMPARED:
                found = Verdict(BITWISE)
        return found

    def _file(self, name: str, md5: str) -> Verdict:
        if file_digest(self.project / name) == md5:
            return Verdict(BITWISE)
        recorded = self.cache.object(md5)
        here = self.root / name
        if recorded is None and here.is_file() and file_digest(here) == md5:
            recorded = here
        if recorded is None:
            return without_the_recorded(name, self.tolerances)
        return compare_files(recorded, self.project / name, name, self.tolerances)


def as_text(
    results: list[Found], environment: Mapping[str, tuple[Any, Any]] | None, *, failed: bool
) -> str:
    """One line an output, then the verdict and what the environment has to do with it.

    Args:
        environment: what changed, by name; None: the recorded run has left no record here.
    """
    width = max(len(found.path) for found in results)
    lines = [
        f"{found.path:{width}}  {found.state}{': ' if found.first else ''}{found.first}"
        for found in results
    ]
    states = [found.state for found in results]
    counts = (f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines += ["", ", ".join(counts), _verdict(results, failed)]
    if NOT_COMPARED in states:
        lines.append("what is not compared is a time or follows from one: params.yaml, verify")
    if environment is None:
        lines.append("the record of the recorded run is not here: what else changed is unknown")
        return "\n".join(lines)
    changed = [f"  {name}: {old} -> {new}" for name, (old, new) in environment.items()]
    lines += (
        ["what else is not as in the recorded run:", *changed]
        if changed
        else ["commit, machine and versions are those of the recorded run"]
    )
    return "\n".join(lines)


def _verdict(results: list[Found], failed: bool) -> str:
    first = next((found for found in results if found.state == DIFFERENT), None)
    if failed:
        return "a stage failed: what it says is above, and what it did not make is not compared"
    if first is not None:
        return f"not the same: first {first.stage} made another {first.path}: {first.first}"
    near = any(found.state == WITHIN for found in results)
    same = (
        "the same within the tolerances of params.yaml, verify" if near else "the same, to the bit"
    )
    unknown = [found.path for found in results if found.state == UNKNOWN]
    return f"{same}, but for what cannot be told: {', '.join(unknown)}" if unknown else same


def _environment(
    root: Path, project: Path, lock: Mapping[str, Entry], stage: str
) -> dict[str, tuple[Any, Any]] | None:
    """What the records of one stage say differently, then and now; None where one is not here."""
    path = f"{RECORDS}{stage}.json"
    recorded = Cache(root).object(lock[stage].outs.get(path, "")) or root / path
    made = project / path
    if not recorded.is_file() or not made.is_file():
        return None
    return environment_changes(json.loads(recorded.read_text()), json.loads(made.read_text()))


@contextlib.contextmanager
def _folder(root: Path, keep: bool) -> Iterator[Path]:
    """On the project's own file system, so that inputs come as links. Removes what runs that were
    killed left."""
    work = root / ".work"
    work.mkdir(exist_ok=True)
    for left in work.glob("verify-*.lock"):
        with locked(left) as dead:
            if dead is not None:
                shutil.rmtree(left.with_suffix(""), ignore_errors=True)
                left.unlink()
    place = work / f"verify-{uuid.uuid4().hex[:8]}"
    lock = work / f"{place.name}.lock"
    with locked(lock):
        place.mkdir()
        try:
            yield place
        finally:
            if keep:
                print(f"kept: {place}", file=sys.stderr)
            else:
                shutil.rmtree(place, ignore_errors=True)
            lock.unlink()
