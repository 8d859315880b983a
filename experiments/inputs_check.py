"""What settings name and nobody has: paths that no stage makes, prompts, verifiers that do not fit.

Asked before any stage runs; whether the settings themselves can be read is `settings_check`'s to
say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from experiments.graph import Graph
from stages import outside
from stages.dvc_files import read_lock
from stages.fitting import check_fits

# What an arm that was added needs.
WRITE_IN = (
    "write metrics/{arm}.jsonl and its other files beside the other arms', in the commands and "
    "deps of compare and report in dvc.yaml"
)
ARM_INPUTS = ("init", "head", "states", "vocab")
FILES = (".jsonl", ".gz")  # prompts: what ends so is a file, whether it is there or not


def check_inputs(
    params: Mapping[str, Any], graph: Graph, where: str, *, there: Collection[str] | None = None
) -> None:
    """Refuses an arm or a stage that reads what is not there and no stage makes, and a comparison
    of an arm that the pipeline does not compare.

    Args:
        graph: with the arms of `params`.
        there: relative paths that are there; None: all that lie in the project's folder.

    Raises:
        HarnessError: names arm, key and path, or stage and path.
    """
    arms = params.get("arms", {})
    if not arms:
        return
    places = {path.split("/")[0] for path in graph.made}

    def lacks(path: str) -> bool:
        if graph.makes(path):
            return False
        if there is None or Path(path).is_absolute():
            return not (graph.root / path).exists()
        return str(Path(path)) not in there

    for name, arm in arms.items():
        for key in ARM_INPUTS:
            if lacks(arm[key]):
                raise HarnessError(
                    "an arm starts from what is not there",
                    where=f"{where}, arms.{name}.{key}",
                    rule="a path that exists, or what a stage makes, checkpoints/<arm> among them",
                    got=arm[key],
                    fix="correct the path",
                )
    for name, paths in graph.read.items():
        for path in paths:
            if path.split("/")[0] in places and lacks(path):
                raise HarnessError(
                    "a stage reads what no stage makes with these arms",
                    where=f"{where}, arms; dvc.yaml, {name}",
                    rule="what dvc.yaml names of an arm is made by an arm of that name",
                    got=f"{path}; arms {', '.join(arms)}",
                    fix="keep the arm (with a small budget, if it does not matter), or take it out "
                    "of dvc.yaml too",
                )
    for name in params["compare"]["arms"] if "compare" in params else ():
        if name in graph.uncompared:
            raise HarnessError(
                "an arm is to be compared that the pipeline does not compare",
                where=f"{where}, compare.arms",
                rule=f"two of {', '.join(arm for arm in arms if arm not in graph.uncompared)}",
                got=name,
                fix=f"give an arm of these {name}'s settings, or {WRITE_IN.format(arm=name)}",
            )


def check_sources(params: Mapping[str, Any], root: Path, where: str) -> None:
    """Refuses prompts that are not there, a verifier that is none, and settings that do not fit it.

    What a stage has read already and now lacks is not asked for: its results may be from another
    machine, and stand.

    Args:
        root: folder with dvc.lock, from which paths count.

    Raises:
        HarnessError: names key and path, or key, rule and value.
    """
    from eagle3.verifier import VerifierSpec

    for section in outside.KEYS:
        for key, value in outside.named(section, params.get(section) or {}):
            if not (root / value).exists() and value in _read_before(root, section):
                continue
            if section == "verifier":
                place = root / value
                spec = VerifierSpec.open(place if place.is_dir() else value)
                check_fits(params, spec, where=where)
            elif not (root / value).is_file() and (key != "source" or _is_file(root, value)):
                raise HarnessError(
                    "there are no prompts",
                    where=f"{where}, {section}.{key}",
                    rule="a .jsonl file that is there, or the name of a Hugging Face data set"
                    if key == "source"
                    else "a file that is there",
                    got=value,
                    fix="correct the path",
                )


def _read_before(root: Path, section: str) -> set[str]:
    """What the section named when its stage last ran."""
    lock = read_lock(root)
    values = lock[section].params.get(section) if section in lock else None
    return {value for _, value in outside.named(section, values or {})}


def _is_file(root: Path, value: str) -> bool:
    """Whether a file is meant and no data set, which is named `name` or `owner/name`."""
    path = Path(value)
    hub = value.count("/") <= 1 and not path.is_absolute() and not value.startswith((".", "~"))
    return path.suffix in FILES or (root / value).exists() or not hub
