"""What training and evaluation tell the outside of a run, without knowing who listens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


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
