"""A result that is committed by hand as the first step of a chain.

What stands behind it is in the file itself (experiments/evidence.py); where an older one says
nothing, in the MLflow run that has it as an artifact. Git says when it came. What none of them
knows is named as lacking.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.tracking import flatten
from experiments.evidence import KEY
from experiments.study_origin import behind, study_run
from stages.dvc_files import Entry, file_digest, read_lock
from stages.lineage import Lineage, Step, Target
from stages.provenance import git
from stages.sending import open_client
from stages.tracking import resolve_store

# Keys by which results say what they are of, in older files all that they say.
SAYS = (
    *("study", "digest", "verifier", "drafter", "arm", "documents", "machine", "plan", "engine"),
    *("dtype", "device", "threads", "torch", "transformers", "k", "prompts", "max_tokens"),
    *("cost", "seeds", "tokens", "level", "trained_seeds", "simulations"),
)
STUDIES = ("study.json", "aa_test.json", "crossover.json", "scaling.json")
TOLD_ANEW = (KEY, "seconds", "verifier")  # what a file may have otherwise than its run's artifact

EVIDENCE = "evidence"  # what kind of target such a file is
Said = list[tuple[str, str]]  # a word and a sentence


def evidence_origin(
    root: Path, lineage: Lineage, asked: str
) -> tuple[Target, list[Step], Said] | None:
    """The file, the chains of the stages whose outputs it comes from, and what is said of it
    besides; None where there is no such JSON file in the project."""
    path = (Path.cwd() / asked).absolute()
    if not (path.is_file() and path.is_relative_to(root) and path.suffix == ".json"):
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    name = path.relative_to(root).as_posix()
    step, before, said = _step(root, lineage, path, name, found)
    said += _committed(root, name)
    entry = Entry(name, "", {}, step.outs, step.params, current=False)
    return Target(asked, EVIDENCE, entry), [step, *before], said


def _step(
    root: Path, lineage: Lineage, path: Path, name: str, found: Mapping[str, Any]
) -> tuple[Step, list[Step], Said]:
    outs = {name: file_digest(path)}
    says = flatten({key: found[key] for key in SAYS if key in found})
    said = [("says", f"{key}: {json.dumps(value)}") for key, value in says.items()]
    if record := found.get(KEY):
        needs, before = behind(lineage, record["inputs"])
        step = Step(name, outs, needs, record["settings"], record)
        return step, before, [*said, *_lacks(lineage, step)]
    run, why = _run_of(root, path.name, found) if path.name in STUDIES else (None, None)
    if run is not None and (led := study_run(root, lineage, run)) is not None:
        _, (first, *rest) = led
        said.append(("found", f"it says nothing of its origin; MLflow run {run} has it"))
        step = replace(first, stage=name, outs=outs)
        return step, rest, [*said, *_lacks(lineage, step)]
    said += [("lacks", text) for text in (*_older(found), why) if text]
    record = {"written": "it has no record"}
    return Step(name, outs, {}, {}, record), [], [*said, *_then(root, lineage, name)]


def _lacks(lineage: Lineage, step: Step) -> Iterator[tuple[str, str]]:
    """What a record does not say, or says of what is no longer here."""
    record = step.record
    if record.get("commit") in (None, "none"):
        yield "lacks", "the commit: it was made outside git"
    elif record.get("dirty") and not step.runs:
        yield "lacks", "its code: changes that were not committed, and no MLflow run keeps them"
    elif record.get("dirty"):
        yield "code", "with changes that were not committed; its MLflow run has uncommitted.diff"
    if not step.needs:
        yield "lacks", "its data: it names nothing that DVC made"
    for path, (_, maker) in step.needs.items():
        now = next((entry for entry in lineage.lock.values() if path in entry.outs), None)
        if maker is None and now is not None:
            yield "lacks", f"{path}: {now.name} has made another one since, {now.outs[path][:12]}"


def _older(found: Mapping[str, Any]) -> Iterator[str]:
    """What a file without a record does not say."""
    yield "the code: no commit and no digest of it"
    if "digest" in found:
        yield "data and settings, but for one digest of all: the same digest is the same study"
    else:
        yield "the data: no digest of it" + ("" if "verifier" in found else ", and no verifier")
    yield f"its writer records these now, under {KEY}: run it again"


def _then(root: Path, lineage: Lineage, name: str) -> Iterator[tuple[str, str]]:
    """The data of the pipeline when the file came into git: its own, if nothing ran in between."""
    first = (git(root, "log", "--format=%h", "--", name) or "").split()[-1:]
    lock = git(root, "show", f"{first[0]}:./dvc.lock") if first else None
    if lock is None:
        return
    now = {path: md5 for entry in lineage.lock.values() for path, md5 in entry.outs.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dvc.lock").write_text(lock)
        then = read_lock(Path(folder))
    for entry in then.values():
        for path, md5 in entry.outs.items():
            if path.startswith("data/"):
                state = "as now" if now.get(path) == md5 else "another now"
                yield "then", f"{path} {md5[:12]} in dvc.lock at {first[0]}, {state}"


def _run_of(root: Path, name: str, found: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Id of the study's run whose artifact this result is, and why there is none."""
    store = resolve_store(root)
    if not store.is_there:
        return None, "a run in MLflow: there is no store here"
    try:
        client, experiment = open_client(store)
        for run in client.search_runs([experiment], "tags.kind = 'study'"):
            run_id = run.info.run_id
            if name not in {item.path for item in client.list_artifacts(run_id)}:
                continue
            with tempfile.TemporaryDirectory() as folder:
                kept = json.loads(Path(client.download_artifacts(run_id, name, folder)).read_text())
            same = kept.keys() & found.keys() - set(TOLD_ANEW)
            if same and all(kept[key] == found[key] for key in same):
                return str(run_id), None
    except Exception as error:  # whatever a client, a driver or a network raises
        return None, f"a run in MLflow: {type(error).__name__} at {store.uri}"
    return None, "a run in MLflow: none of the studies there has made it"


def _committed(root: Path, name: str) -> Said:
    """When the file came into git, and when it was last changed there."""
    log = (git(root, "log", "--format=%h %cs %s", "--", name) or "").splitlines()
    if not log:
        return [("git", "not committed")]
    said = [("git", f"came with {log[-1]}")]
    if len(log) > 1:
        said.append(("git", f"last changed in {log[0]}"))
    if git(root, "status", "--porcelain", "--", name):
        said.append(("git", "changed since, and not committed"))
    return said
