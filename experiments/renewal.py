"""`dvc repro`, and before it those stages whose files from outside changed behind their paths.

DVC compares settings, so it knows such a file by its path. What a stage read of it stands in its
provenance (stages/outside.py).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages import outside
from stages.params import read_params
from stages.signals import run_child


def changed(folder: Path, stage: str) -> list[str]:
    """Paths from outside that are there, and that the stage's present results do not come from."""
    values = read_params(folder / "params.yaml").get(stage) or {}
    now = outside.digests(folder, stage, values)
    if not now:
        return []
    record = folder / "provenance" / f"{stage}.json"
    known: Mapping[str, str] = {}
    # A record that is damaged says nothing; DVC puts it back, or its stage writes it again.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = json.loads(record.read_text()).get("outside", {})
    return [path for path, content in now.items() if known.get(path) != content]


def repro(folder: Path, environment: Mapping[str, str], targets: Sequence[str] = ()) -> int:
    """Runs the pipeline, or only what these stages need; DVC's exit code."""

    def dvc(*arguments: str) -> int:
        command = [sys.executable, "-m", "dvc", "repro", *arguments]
        return run_child(command, cwd=folder, env=environment)

    # The second time: a stage whose settings became those of an earlier run has that one's results
    # back, whatever its files were then.
    for _ in range(2):
        for stage in outside.KEYS:
            if changed(folder, stage) and (code := dvc(stage)):  # it may be due for other reasons
                return code
            if paths := changed(folder, stage):
                print(f"{stage} runs again, since this has changed behind its path: "
                      f"{', '.join(paths)}", flush=True)  # fmt: skip
                if code := dvc("--force", "--single-item", stage):
                    return code
        if code := dvc(*targets):
            return code
        if not any(changed(folder, stage) for stage in outside.KEYS):
            break
    return 0
