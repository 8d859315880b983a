"""A drafter of `eagle3 train` as the first step of a chain: DVC does not know it, but made what it
read. What stands behind it is in the file beside its weights, and beside its MLflow run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from eagle3.checkpoint import WEIGHTS
from experiments.study_origin import behind
from stages import provenance
from stages.dvc_files import Entry, file_digest
from stages.lineage import Lineage, Step, Target

RECORD = "provenance.json"


def run_name(output: Path) -> str:
    """Of the training that wrote this folder."""
    return f"train {output.name}"


def named_inputs(
    root: Path, paths: Iterable[Path | str | None], digests: Mapping[str, str]
) -> dict[str, str]:
    """What a training read, by path: with DVC's digest where DVC made it, as a stage names it.

    Args:
        paths: as given on the command line; an id of the hub among them is no path here.
        digests: of what was read, by path or by what it is; kept where DVC did not make it.
    """
    inside = [own for path in paths if path is not None and (own := _within(root, path))]
    made = provenance.input_digests(root, inside)
    others = {
        name: value
        for name, value in digests.items()
        if not (own := _within(root, name)) or not {*map(str, (own, *own.parents))} & made.keys()
    }
    return {**made, **others}


def _within(root: Path, path: Path | str) -> Path | None:
    """Below the project, from its root on; None for what lies elsewhere or is not there."""
    found = Path(path).absolute()
    return found.relative_to(root) if found.exists() and found.is_relative_to(root) else None


def trained_origin(lineage: Lineage, asked: str) -> tuple[Target, list[Step]] | None:
    """The training, and the chains of the stages whose outputs it read; None where `asked` is no
    folder that `eagle3 train` has written, nor the record in one."""
    path = Path.cwd() / asked
    file = path / RECORD if path.is_dir() else path
    if file.name != RECORD or not (file.is_file() and (file.parent / WEIGHTS).is_file()):
        return None
    try:
        record = json.loads(file.read_text())
        inputs, settings = dict(record["inputs"]), dict(record["settings"])
    except (ValueError, KeyError, TypeError):
        return None
    needs, before = behind(lineage, inputs)
    budget = {name: record[name] for name in ("epochs", "tokens") if record.get(name) is not None}
    name, weights = run_name(file.parent), file.parent / WEIGHTS
    shown = _within(lineage.root, weights) or weights
    outs = {str(shown): file_digest(weights)}
    step = Step(name, outs, needs, {**budget, "train": settings}, record)
    entry = Entry(name, "", inputs, outs, step.params, current=False)
    return Target(asked, "path", entry), [step, *before]
