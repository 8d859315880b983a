"""Two origins side by side in plain words, for a reader who knows neither.

Settings come first, then code, data, machine and what came out of it. Knows nothing of where the
facts come from.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.differences import (
    ARM,
    CODE,
    DATA,
    FROM_COMMIT,
    MACHINE,
    RESULTS,
    SETTINGS,
    STAGES,
    Difference,
    two_arms,
)
from stages.lineage import Step, Target

SHORT = 12  # letters of a digest or a commit
LONGEST = 60  # letters of a value in a table
FILES = 6  # that are named where more differ


def as_text(
    first: tuple[Target, Sequence[Step]],
    second: tuple[Target, Sequence[Step]],
    found: Sequence[Difference],
    varies: Sequence[str],
) -> str:
    """The whole comparison.

    Args:
        varies: patterns `file:key` of results that differ from run to run (times).
    """
    sections = [_heads(first, second)]
    if not found:
        return "\n\n".join([*sections, "The same origin: settings, code, data and results."])
    sections += [
        _section("Settings", _by_key(found, SETTINGS, "read by")),
        _section("Code", _code(first[1], second[1], found)),
        _section("Data", _data(found)),
        _section("Machine", _by_key(found, MACHINE, "in")),
        _section("Results", _results(found, varies)),
    ]
    return "\n\n".join(sections)


def _heads(first: tuple[Target, Sequence[Step]], second: tuple[Target, Sequence[Step]]) -> str:
    rows = []
    for letter, (target, steps) in zip("AB", (first, second), strict=True):
        value = "" if target.value is None else f" = {target.value}"
        started = steps[0].record.get("started", "at an unknown time")
        rows.append([letter, f"{target.asked}{value}", f"made by {steps[0].stage}, {started}"])
    lines = list(_table(rows, indent=""))
    if arms := two_arms(first[1], second[1]):
        lines.append(f"{ARM} stands for {arms[0]} in A and for {arms[1]} in B.")
    return "\n".join(lines)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *lines]) if lines else f"{title}: the same"


def _by_key(found: Sequence[Difference], kind: str, verb: str) -> list[str]:
    """One row a key with its value on both sides; stages that say the same share it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for item in found:
        if item.kind == kind:
            key = (item.name, _value(item.one), _value(item.other))
            rows.setdefault(key, []).append(item.stage)
    table = [[*key, f"{verb} {', '.join(stages)}"] for key, stages in rows.items()]
    return list(_table([["", "A", "B", ""], *table])) if table else []


def _code(one: Sequence[Step], other: Sequence[Step], found: Sequence[Difference]) -> list[str]:
    files: dict[str, list[str]] = {}
    for item in found:
        if item.kind == CODE and item.name not in FROM_COMMIT:
            files.setdefault(item.stage, []).append(item.name)
    lines = [f"  {stage}: other code in {_few(names)}" for stage, names in files.items()]
    moved = any(item.kind == CODE and item.name in FROM_COMMIT for item in found)
    if moved:
        said = "so the commits differ:" if files else "no file differs; the commits do:"
        lines.append(f"  {said} A from {_commits(one)}, B from {_commits(other)}")
    return lines


def _commits(steps: Sequence[Step]) -> str:
    known = {
        str(step.record["commit"])[:SHORT]
        + (" and uncommitted changes" * bool(step.record["dirty"]))
        for step in steps
        if step.record.get("commit")
    }
    return ", ".join(sorted(known)) or "an unknown commit"


def _data(found: Sequence[Difference]) -> list[str]:
    """What a stage read, and who made it; then the stages that stand behind one side only."""
    lines = []
    for item in found:
        if item.kind != DATA:
            continue
        by = f", made by {item.maker}" if item.maker else ", which no stage makes"
        if item.one is None or item.other is None:
            who = "A" if item.other is None else "B"
            lines.append(f"  {item.stage} reads {item.name}{by}: in {who} only")
            continue
        lines.append(
            f"  {item.stage} reads another {item.name}{by}: "
            f"A {item.one[:SHORT]}, B {item.other[:SHORT]}"
        )
    for letter, side in (("A", "one"), ("B", "other")):
        alone = [getattr(item, side) for item in found if item.kind == STAGES]
        if names := [name for name in alone if name]:
            lines.append(f"  stages behind {letter} only: {', '.join(names)}")
    return lines


def _results(found: Sequence[Difference], varies: Sequence[str]) -> list[str]:
    """What came out otherwise, and from which stage on that is due to none of the above."""
    causes = {item.stage for item in found if item.kind in (SETTINGS, DATA)}
    causes |= {item.stage for item in found if item.kind == CODE and item.name not in FROM_COMMIT}
    by_stage: dict[str, list[str]] = {}
    for item in found:
        if item.kind == RESULTS and not _times(item.name, varies):
            by_stage.setdefault(item.stage, []).append(item.name)
    lines = [
        f"  {stage} made other {_few(names)}"
        + (
            ""
            if stage in causes
            else ", from the same settings, code and data: see `eagle3 verify`"
        )
        for stage, names in by_stage.items()
    ]
    if not lines and any(item.kind == RESULTS for item in found):
        lines.append("  the same but for times")
    return lines


def _times(path: str, varies: Sequence[str]) -> bool:
    whole = (pattern.removesuffix(":*") for pattern in varies if pattern.endswith(":*"))
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in whole)


def _few(names: Sequence[str]) -> str:
    rest = len(names) - FILES
    return ", ".join(names[:FILES]) + (f" and {rest} more" if rest > 0 else "")


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _table(rows: Sequence[Sequence[str]], indent: str = "  ") -> Iterator[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()
