"""Strict reading of params.yaml: the file, its sections, and overlays onto it.

Read as YAML 1.2, as DVC does, so `1e-4` is a number and a key given twice is an error. What a
section may hold is said by the settings model beside its component, never here.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eagle3.errors import HarnessError
from eagle3.settings import SettingsT, merged, read_settings

SECTIONS = (
    "run",
    "verifier",
    "sibling",
    "prompts",
    "regenerate",
    "sibling_regenerate",
    "extract",
    "parity",
    "vocab",
    "sibling_vocab",
    "train",
    "arms",
    "export",
    "evaluate",
    "mistakes",
    "compare",
    "report",
    "study",
    "scaling",
    "plan",
    "verify",
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        HarnessError: missing, not YAML (with its line), a key twice, or not a mapping.
    """
    if not path.is_file():
        raise HarnessError(
            "settings file is missing",
            where=path,
            rule="a YAML file",
            got="no such file",
            fix="correct the path",
        )
    try:
        value = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise HarnessError(
            "settings file is not text",
            where=path,
            rule="YAML in UTF-8",
            got=str(error),
            fix="save it as UTF-8",
        ) from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise HarnessError(
            "settings file is not valid YAML",
            where=where,
            rule=getattr(error, "problem", None) or str(error),
            fix="correct this line or the one before",
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HarnessError(
            "settings file is not a mapping",
            where=path,
            rule="key: value",
            got=type(value).__name__,
            fix="correct the file: one section or more",
        )
    return value


def read_params(path: Path) -> dict[str, Any]:
    """params.yaml as plain values, its top-level sections checked.

    Raises:
        HarnessError: as `read_yaml`, or a section that nothing reads.
    """
    params = read_yaml(path)
    if unknown := [name for name in params if name not in SECTIONS]:
        raise HarnessError(
            "settings file has a section that nothing reads",
            where=path,
            rule=f"sections: {', '.join(SECTIONS)}",
            got=", ".join(map(str, unknown)),
            fix="correct the name or remove the section",
        )
    return params


def section_values(params: Mapping[str, Any], key: str, *, where: Path) -> dict[str, Any]:
    """The mapping under a dotted key.

    Raises:
        HarnessError: no such key, or it is not a mapping.
    """
    value: Any = params
    walked: list[str] = []
    for part in key.split("."):
        if part not in value:
            raise HarnessError(
                "settings file lacks a section",
                where=where,
                rule=f"known under {'.'.join(walked) or 'the top'}: {', '.join(map(str, value))}",
                got=key,
                fix="add it, or correct the name",
            )
        walked.append(part)
        value = value[part]
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise HarnessError(
                "settings cannot be used",
                where=f"{where}, {'.'.join(walked)}",
                rule="a mapping of keys to values",
                got=repr(value),
                fix="correct the section",
            )
    return value


def read_section(path: Path, model: type[SettingsT], key: str) -> SettingsT:
    """One section of a params file, as its settings model.

    Args:
        key: the section's name; dotted for one inside another, `"arms.scratch"`.

    Raises:
        HarnessError: names file, key, value and rule.
    """
    values = section_values(read_params(path), key, where=path)
    return read_settings(model, values, where=f"{path}, {key}")


def overlaid(base: Mapping[str, Any], overlay: Mapping[str, Any], *, where: Path) -> dict[str, Any]:
    """`base` with the values of `overlay`: mappings key by key, other values (lists too) replaced.

    A null removes an arm; anywhere else it is a value. What keys a section may hold is its settings
    model's to say, of the result.

    Raises:
        HarnessError: a section that nothing reads, or a value where a section stands.
    """
    for name, values in overlay.items():
        if name not in SECTIONS or not isinstance(values, Mapping):
            raise HarnessError(
                "overlay cannot be used",
                where=where,
                rule=f"mappings under these sections: {', '.join(SECTIONS)}",
                got=f"{name}: {values}",
                fix="write the keys that differ under the section that has them",
            )
    both = merged(base, overlay)
    if "arms" in both:
        both["arms"] = {name: arm for name, arm in both["arms"].items() if arm is not None}
    return both


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML text, keys in the order given."""
    text = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(dict(values), text)
    return text.getvalue()
