"""All of params.yaml read by the settings models of all stages, before any of them runs.

A stage reads its own section when its turn comes; a mistake in a late one would cost the hours
before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle3.errors import HarnessError
from eagle3.settings import Settings, read_settings
from stages.params import SECTIONS

ARM_NAME = re.compile(r"[A-Za-z0-9_][\w-]*", re.ASCII)
EXPORTS = "export"  # checkpoints/export/ has every arm's


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
