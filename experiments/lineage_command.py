"""`eagle3 lineage`: an origin in words or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.reading import read_object
from experiments import differences_text
from experiments.differences import differences
from experiments.evidence_origin import EVIDENCE, Said, evidence_origin
from experiments.study_origin import study_run
from experiments.trained_origin import trained_origin
from stages.lineage import SUMMARY, Lineage, Step, Target
from stages.params import read_params

SHORT = 12  # letters of a digest
LONGEST = 90  # letters of a setting; --json has all of them
# A fresh clone has dvc.lock, and not the records that lie in DVC's cache.
NOT_RUN_HERE = (
    "Digests and settings are those of dvc.lock. None of these stages has left a record here:\n"
    "commits, times and MLflow runs are with whoever ran them; `make repro` makes its own."
)


def run(root: Path, asked: str, against: str | None, *, as_json: bool) -> None:
    """Prints the chain behind `asked`, or what differs from the one behind `against`.

    Raises:
        HarnessError: see `Lineage.find`.
    """
    lineage = Lineage(root)
    target, steps, said = _origin(root, lineage, asked)
    if against is not None:
        other, others, _ = _origin(root, lineage, against)
        if target.kind == other.kind == EVIDENCE:  # what two files come from, whatever their names
            steps, others = _unnamed(steps), _unnamed(others)
        _compare((target, steps), (other, others), _varies(root), as_json)
    elif as_json:
        about: dict[str, Any] = {"asked": asked, "kind": target.kind}
        if target.value is not None:
            about["value"] = target.value
        if said:
            about["said"] = [{word: text} for word, text in said]
        print(json.dumps({**about, "steps": [step.as_json() for step in steps]}, indent=2))
    else:
        print(as_text(target, steps, said))


def _origin(root: Path, lineage: Lineage, asked: str) -> tuple[Target, list[Step], Said]:
    try:
        target = lineage.find(asked)
    except json.JSONDecodeError:
        if (root / SUMMARY).is_file():  # if it is this one, it is named
            read_object(root / SUMMARY, fix=f"`git checkout {SUMMARY}`, or make repro")
        raise
    except HarnessError:
        if (run := study_run(root, lineage, asked)) is not None:
            return *run, []
        if (trained := trained_origin(lineage, asked)) is not None:
            return *trained, []
        if (evidence := evidence_origin(root, lineage, asked)) is not None:
            return evidence
        raise
    return target, lineage.chain(target.entry), []


def _unnamed(steps: list[Step]) -> list[Step]:
    first = steps[0]
    if "commit" not in first.record:
        raise HarnessError(
            "a file that says nothing of its origin cannot be compared",
            where=first.stage,
            fix="ask for it alone, or run again what made it",
        )
    return [replace(first, stage="the result", outs={}), *steps[1:]]


def as_text(target: Target, steps: list[Step], said: Said | None = None) -> str:
    """The chain, one paragraph a stage, each above those that it needs.

    Args:
        said: what is known of the first besides.
    """
    first = target.asked if target.value is None else f"{target.asked} = {_shown(target.value)}"
    # Settings of what was asked for, of its arm's other stages (a τ is asked for, its training is
    # what one wants to know), and of where everything begins; --json has those of all.
    _, at, arm = steps[0].stage.partition("@")
    told = {step.stage for step in steps if at and step.stage.endswith(at + arm)} | {steps[0].stage}
    paragraphs = [_paragraph(step, settings=step.stage in told) for step in steps]
    paragraphs[0] += "".join(f"\n  {word:<7} {_cut(text)}" for word, text in said or [])
    if not any(step.record for step in steps):
        paragraphs.append(NOT_RUN_HERE)
    return "\n\n".join([first, *paragraphs])


def _paragraph(step: Step, *, settings: bool) -> str:
    record = step.record
    code = str(record.get("commit") or "unknown")[:SHORT] + ("+" if record.get("dirty") else "")
    when = record.get("started") or record.get("written") or "its record is not here"
    lines = [f"{step.stage}   code {code}   {when}"]
    if named := (record.get("experiment") or {}).get("name"):
        lines[0] += f"   experiment {named}"
    if step.reused:
        lines.append("  reused  from an earlier run: its inputs were made again with equal bytes")
    runs = [run for run in record.get("mlflow_runs", []) if run]
    lines += [f"  MLflow  {run['run_id'] or 'never sent'}  {run['name']}" for run in runs]
    lines += [f"  made    {path}  {md5[:SHORT]}" for path, md5 in step.outs.items()]
    lines += [
        f"  from    {path}  {md5[:SHORT]}  {maker or 'not made by a stage'}"
        for path, (md5, maker) in step.needs.items()
    ]
    source = not any(maker for _, maker in step.needs.values()) or step.stage == "prompts"
    if settings or source:
        own = {name: value for name, value in step.params.items() if name != "run"}
        lines += [f"  setting {name}: {_shown(value)}" for name, value in _flat(own)]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return _cut(json.dumps(value, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value


def _compare(
    first: tuple[Target, list[Step]],
    second: tuple[Target, list[Step]],
    varies: list[str],
    as_json: bool,
) -> None:
    found = list(differences(first[1], second[1]))
    if as_json:
        asked = {"a": first[0].asked, "b": second[0].asked}
        facts = [
            {"stage": d.stage, "kind": d.kind, "name": d.name, "a": d.one, "b": d.other}
            for d in found
        ]
        print(json.dumps({**asked, "differences": facts}, indent=2))
    else:
        print(differences_text.as_text(first, second, found, varies))


def _varies(root: Path) -> list[str]:
    """Patterns of results that are times, as `eagle3 verify` leaves them out."""
    settings = read_params(root / "params.yaml").get("verify") or {}
    return list(settings.get("varies") or [])
