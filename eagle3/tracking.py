"""What training and evaluation tell the outside of a run, without knowing who listens.

`JsonlTracker` is the local journal: everything said is appended to one file before anyone sends it
anywhere. It is keyed by (metric, step) and by parameter name: the first value stands, so a run that
resumes after a kill may say its last steps again. Knows nothing of MLflow.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes what a run has to say. Implementations never raise for a slow or dead store."""

    def log_params(self, params: Mapping[str, object]) -> None:
        """Settings of the run; nested ones with dotted keys."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Words about the run."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers at an optimizer step. The same name and step again replaces nothing: the first
        value stands, so a resumed run may repeat its steps."""

    def log_artifact(self, path: Path) -> None:
        """A file worth keeping with the run."""


class NullTracker:
    """Listens to nothing."""

    def log_params(self, params: Mapping[str, object]) -> None: ...

    def log_tags(self, tags: Mapping[str, str]) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_artifact(self, path: Path) -> None: ...


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


@dataclass
class Entry:
    """One line of a journal: what was said at one moment (`time` in seconds since the epoch)."""

    time: float
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    step: int = 0
    artifact: str | None = None

    def as_line(self) -> str:
        """JSON without empty fields. NaN and infinities are written as Python's json names them."""
        kept: dict[str, Any] = {"time": self.time}
        for name in ("params", "tags", "metrics", "artifact"):
            if value := getattr(self, name):
                kept[name] = value
        if self.metrics:
            kept["step"] = self.step
        return json.dumps(kept) + "\n"


def read_journal(path: Path, offset: int = 0) -> tuple[list[Entry], int]:
    """The whole lines from a byte offset on, and the offset after the last of them.

    A line without its end is still being written, or was torn by a kill: it is not read.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    return [Entry(**json.loads(line)) for line in data[:whole].splitlines()], offset + whole


class JsonlTracker:
    """Appends to `<folder>/journal.jsonl`; artifacts are copied to `<folder>/artifacts/`.

    Every line is handed to the operating system at once, so a kill of the process loses nothing.
    """

    FILE = "journal.jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / self.FILE
        entries, end = read_journal(self.path)
        self._metrics = {(name, entry.step) for entry in entries for name in entry.metrics}
        self._params = {name: value for entry in entries for name, value in entry.params.items()}
        self._lock = threading.Lock()
        self._file = self.path.open("ab")
        self._file.truncate(end)  # a torn last line

    def log_params(self, params: Mapping[str, object]) -> None:
        said = {name: str(value) for name, value in flatten(params).items()}
        with self._lock:
            new = {name: value for name, value in said.items() if name not in self._params}
            self._params |= new
            # The first value stands here too; what a resumed run does otherwise is kept as a tag.
            changed = {
                f"resumed_with.{name}": value
                for name, value in said.items()
                if self._params[name] != value
            }
            if new or changed:
                self._append(Entry(time.time(), params=new, tags=changed))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        with self._lock:
            self._append(Entry(time.time(), tags={name: str(tags[name]) for name in tags}))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        with self._lock:
            new = {
                name: float(value)
                for name, value in metrics.items()
                if (name, step) not in self._metrics
            }
            if new:
                self._metrics.update((name, step) for name in new)
                self._append(Entry(time.time(), metrics=new, step=int(step)))

    def log_artifact(self, path: Path) -> None:
        kept = self.folder / "artifacts" / path.name
        kept.parent.mkdir(exist_ok=True)
        shutil.copy2(path, kept)
        with self._lock:
            self._append(Entry(time.time(), artifact=path.name))

    def next_step(self, prefix: str) -> int:
        """The step after the last of all metrics whose names begin so; 0 where there is none."""
        steps = [step for name, step in self._metrics if name.startswith(prefix)]
        return max(steps, default=-1) + 1

    def close(self) -> None:
        """Ends writing; the file stays."""
        self._file.close()

    def _append(self, entry: Entry) -> None:
        self._file.write(entry.as_line().encode())
        self._file.flush()
