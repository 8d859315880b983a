"""All of params.yaml read by the settings models of all stages, before any of them runs.

A stage reads its own section when its turn comes; a mistake in a late one would cost the hours
before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.settings import Settings, read_settings
from stages import outside
from stages.dvc_files import read_lock
from stages.fitting import check_fits
from stages.params import SECTIONS, read_yaml

# What an arm that was added needs.
WRITE_IN = (
    "write metrics/{arm}.jsonl and its other files beside the other arms', in the commands and "
    "deps of compare and report in dvc.yaml"
)
ARM_INPUTS = ("init", "head", "states", "vocab")
ARM_NAME = re.compile(r"[A-Za-z0-9_][\w-]*", re.ASCII)
EXPORTS = "export"  # checkpoints/export/ has every arm's
FILES = (".jsonl", ".gz")  # prompts: what ends so is a file, whether it is there or not


def models() -> dict[str, type[Settings]]:
    """The settings model of each section (of each entry in `arms`)."""
    from eagle3.arm import ArmSettings
    from eagle3.comparison import CompareSettings
    from eagle3.contract import ParitySettings
    from eagle3.evaluate import EvaluateSettings
    from eagle3.export import ExportSettings
    from eagle3.extraction.base import ExtractSettings
    from eagle3.mistakes import MistakesSettings
    from eagle3.planning import PlanSettings
    from eagle3.prompt_sources import PromptSettings
    from eagle3.regenerate import RegenerateSettings
    from eagle3.report.page import ReportSettings
    from eagle3.sibling import SiblingSettings
    from eagle3.train_settings import TrainSettings
    from eagle3.verifier_source import VerifierSettings
    from eagle3.vocab import VocabSettings
    from experiments.study.settings import ScalingSettings, StudySettings
    from experiments.verify_command import VerifySettings
    from stages.runner import RunSettings

    return {
        "run": RunSettings,
        "verifier": VerifierSettings,
        "sibling": SiblingSettings,
        "prompts": PromptSettings,
        "regenerate": RegenerateSettings,
        "sibling_regenerate": RegenerateSettings,
        "extract": ExtractSettings,
        "parity": ParitySettings,
        "vocab": VocabSettings,
        "sibling_vocab": VocabSettings,
        "train": TrainSettings,
        "arms": ArmSettings,
        "export": ExportSettings,
        "evaluate": EvaluateSettings,
        "mistakes": MistakesSettings,
        "compare": CompareSettings,
        "report": ReportSettings,
        "study": StudySettings,
        "scaling": ScalingSettings,
        "plan": PlanSettings,
        "verify": VerifySettings,
    }


def uncompared(params: Mapping[str, Any], root: Path) -> list[str]:
    """Arms that are trained and evaluated, but whose counts dvc.yaml's `compare` does not read.

    DVC makes a stage of each arm for everything up to evaluation; what stands after it names its
    files one by one.
    """
    stage = read_yaml(root / "dvc.yaml")["stages"].get("compare")
    read = None if stage is None else {str(dep) for dep in stage.get("deps", [])}
    return [arm for arm in params.get("arms", {}) if read and f"metrics/{arm}.jsonl" not in read]


def made_by_stages(root: Path, arms: Iterable[str]) -> set[str]:
    """All outputs that dvc.yaml names, with these arms."""
    return {
        str(out).replace("${key}", arm)
        for stage in read_yaml(root / "dvc.yaml")["stages"].values()
        for out in stage.get("do", stage).get("outs", [])
        for arm in (*arms, "")
        if arm or "${key}" not in str(out)
    }


def check_inputs(
    params: Mapping[str, Any], root: Path, where: str, *, there: Collection[str] | None = None
) -> None:
    """Refuses an arm or a stage that reads what is not there and no stage makes, and a comparison
    of an arm that the pipeline does not compare.

    Args:
        root: folder with dvc.yaml.
        there: relative paths that are there; None: all that lie in root.

    Raises:
        HarnessError: names arm, key and path, or stage and path.
    """
    arms = params.get("arms", {})
    if not arms:
        return
    made = made_by_stages(root, arms)
    places = {path.split("/")[0] for path in made}

    def lacks(path: str) -> bool:
        above = {path, *map(str, Path(path).parents)}
        if made & above:
            return False
        if there is None or Path(path).is_absolute():
            return not (root / path).exists()
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
    for name, stage in read_yaml(root / "dvc.yaml")["stages"].items():
        for path in map(str, stage.get("deps", [])):
            if path.split("/")[0] in places and lacks(path):
                raise HarnessError(
                    "a stage reads what no stage makes with these arms",
                    where=f"{where}, arms; dvc.yaml, {name}",
                    rule="what dvc.yaml names of an arm is made by an arm of that name",
                    got=f"{path}; arms {', '.join(arms)}",
                    fix="keep the arm (with a small budget, if it does not matter), or take it out "
                    "of dvc.yaml too",
                )

    unread = uncompared(params, root)
    for name in params["compare"]["arms"] if "compare" in params else ():
        if name in unread:
            raise HarnessError(
                "an arm is to be compared that the pipeline does not compare",
                where=f"{where}, compare.arms",
                rule=f"two of {', '.join(arm for arm in arms if arm not in unread)}",
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


def check_settings(params: Mapping[str, Any], where: str) -> None:
    """Reads every section.

    Args:
        where: names the file, for the error.

    Raises:
        HarnessError: a section is missing, or has a key or value that its model refuses.
    """
    from eagle3.arm import arm_settings

    known = models()
    if missing := [name for name in SECTIONS if name not in params]:
        raise HarnessError(
            "settings file lacks a section",
            where=where,
            rule=f"sections: {', '.join(SECTIONS)}",
            got=", ".join(missing),
            fix="take the section over from the project's params.yaml",
        )
    for name, model in known.items():
        if not isinstance(params[name], Mapping):
            raise HarnessError(
                "settings cannot be used",
                where=f"{where}, {name}",
                rule="a mapping of keys",
                got=f"{params[name]!r:.80}",
                fix="correct the section",
            )
        if name != "arms":
            read_settings(model, params[name], where=f"{where}, {name}")
    for name, values in params["arms"].items():
        if not isinstance(name, str) or not ARM_NAME.fullmatch(name) or name == EXPORTS:
            raise HarnessError(
                "an arm's name cannot be used",
                where=f"{where}, arms",
                rule="letters, digits, _ and -, as text: it names files and stages; "
                f"{EXPORTS} is taken",
                got=repr(name),
                fix="another name",
            )
        arm = read_settings(known["arms"], values, where=f"{where}, arms.{name}")
        changes = arm.model_dump()["train"]
        arm_settings(params["train"], changes, where=f"{where}, arms.{name}.train over train")
    for name in params["compare"].get("arms") or ():
        if name not in params["arms"]:
            raise HarnessError(
                "the arms to compare are not all there",
                where=f"{where}, compare.arms",
                rule=f"two of {', '.join(params['arms'])}",
                got=name,
                fix="correct the name, or add the arm under arms",
            )
