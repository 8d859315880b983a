"""Strict settings: the base of every settings model, reading plain values into one, laying over.

A component's settings stand beside the component; this file knows none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3.errors import HarnessError


class Settings(BaseModel):
    """Frozen, strict and closed: an unknown key, a wrong type or a NaN is an error at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


SettingsT = TypeVar("SettingsT", bound=Settings)


def read_settings(model: type[SettingsT], values: Mapping[str, Any], *, where: str) -> SettingsT:
    """Makes `model` out of plain values.

    Args:
        where: file and section the values come from, for the error.

    Raises:
        HarnessError: names file and key, the rule and the value received, for every bad key.
    """
    try:
        # A section that is no mapping is pydantic's to refuse.
        plain = dict(values) if isinstance(values, Mapping) else values
        return model.model_validate(plain)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"]) or "(section)"
            rule = item["msg"]
            if item["type"] == "extra_forbidden":
                rule = f"unknown key; known: {', '.join(sorted(model.model_fields))}"
            problems.append(f"{key} = {item['input']!r}: {rule}")
        raise HarnessError(
            "settings cannot be used",
            where=where,
            rule="\n        ".join(problems),
            fix="correct the named keys",
        ) from None


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`: mappings key by key, other values (lists too) replaced."""
    both = dict(old)
    for key, value in new.items():
        deeper = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if deeper else value
    return both
