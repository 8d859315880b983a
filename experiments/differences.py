"""What differs between two origins, as plain facts: settings, code, data, machine, results.

Knows chains of stages (stages/lineage.py) and provenance records, not how anyone prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.tracking import flatten
from stages.lineage import Step

STAGES, SETTINGS, CODE, DATA, MACHINE, RESULTS = (
    *("stages", "settings", "code", "data", "machine", "results"),
)
ARM = "<arm>"
ABSENT = None

FROM_COMMIT = ("commit", "changed")
FROM_MACHINE = (
    *("experiment", "python", "platform", "processor", "cores", "threads", "seed", "gpu"),
    *("engines", "lock", "torch"),
)


@dataclass(frozen=True)
class Difference:
    """One fact of a stage in both origins; `ABSENT` where one knows nothing of it.

    `maker`: the stage that made an input, where one did.
    """

    stage: str
    kind: str
    name: str
    one: Any
    other: Any
    maker: str | None = None


def differences(one: Sequence[Step], other: Sequence[Step]) -> Iterator[Difference]:
    """Facts that differ between two chains, from their beginnings on.

    Stages are matched by name; where two arms were asked for, those of one with those of the
    other's, under the name `ARM`.
    """
    arms = two_arms(one, other)
    ours, theirs = _by_role(one, arms and arms[0]), _by_role(other, arms and arms[1])
    for role in [*reversed(ours), *(name for name in reversed(theirs) if name not in ours)]:
        a, b = ours.get(role), theirs.get(role)
        if a is None or b is None:
            yield Difference(role, STAGES, role, a and a[0].stage, b and b[0].stage)
            continue
        facts, others = a[1], b[1]
        makers = _makers(b[0], arms and arms[1]) | _makers(a[0], arms and arms[0])
        for kind, name in sorted({*facts, *others}, key=lambda key: (_ORDER[key[0]], key[1])):
            x, y = facts.get((kind, name), ABSENT), others.get((kind, name), ABSENT)
            if x != y:
                maker = makers.get(name) if kind == DATA else None
                yield Difference(role, kind, name, x, y, maker)


_ORDER = {kind: n for n, kind in enumerate((STAGES, SETTINGS, CODE, DATA, MACHINE, RESULTS))}


def _by_role(
    steps: Sequence[Step], arm: str | None
) -> dict[str, tuple[Step, dict[tuple[str, str], Any]]]:
    """Each stage and what can differ of it, by kind and name; `arm` goes under the name `ARM`."""
    known = {}
    for step in steps:
        record = step.record
        groups: dict[str, Mapping[str, Any]] = {
            SETTINGS: flat_settings(step.params),
            CODE: {
                **{name: record[name] for name in FROM_COMMIT if name in record},
                **(record.get("code") or {}),
            },
            DATA: {path: md5 for path, (md5, _) in step.needs.items()},
            MACHINE: flatten({name: record[name] for name in FROM_MACHINE if name in record}),
            RESULTS: step.outs,
        }
        role = role_of(step.stage, arm)
        renamed = arm if role != step.stage else None
        known[role] = (
            step,
            {
                (kind, named(name, renamed)): value
                for kind, values in groups.items()
                for name, value in values.items()
            },
        )
    return known


def _makers(step: Step, arm: str | None) -> dict[str, str]:
    """Who made each input, both under their names in `_by_role`."""
    renamed = arm if role_of(step.stage, arm) != step.stage else None
    return {
        named(path, renamed): role_of(maker, arm)
        for path, (_, maker) in step.needs.items()
        if maker
    }


def two_arms(one: Sequence[Step], other: Sequence[Step]) -> tuple[str, str] | None:
    """The arms that were asked for, where they are two."""
    a, b = (steps[0].stage.partition("@")[2] for steps in (one, other))
    return (a, b) if a and b and a != b else None


def role_of(stage: str, arm: str | None) -> str:
    """A stage's name, with `ARM` in place of the arm that was asked for."""
    return f"{stage.partition('@')[0]}@{ARM}" if arm and stage.endswith(f"@{arm}") else stage


def named(name: str, arm: str | None) -> str:
    """A key or a path, with `ARM` in place of an arm's name; None: as it is."""
    return name if arm is None else re.sub(rf"\b{re.escape(arm)}\b", ARM, name)


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """As `flatten`, lists of mappings too, by position."""
    flat: dict[str, Any] = {}
    for name, value in flatten(values).items():
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            numbered = {f"{name}.{n}": item for n, item in enumerate(value)}
            flat |= flat_settings(numbered)
        else:
            flat[name] = value
    return flat


def environment_changes(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """What two provenance records say differently of commit, machine, versions and of what was
    read from outside of the project."""
    told = (*FROM_COMMIT, *FROM_MACHINE, "outside")
    a, b = (
        flatten({name: record[name] for name in told if name in record})
        for record in (before, after)
    )
    # A record that is older than a field says nothing of it.
    return {key: (a[key], b[key]) for key in sorted(a.keys() & b.keys()) if a[key] != b[key]}
