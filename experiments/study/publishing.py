"""What a study found, beside the code and in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.report.data import ReportData
from eagle3.report.page import ReportSettings, render
from eagle3.tracking import Tracker
from eagle3.workspace import write_atomically, write_json


def publish(path: Path, found: Mapping[str, Any], tracker: Tracker) -> None:
    """Writes the JSON, and gives it to a run."""
    write_json(path, found)
    tracker.log_artifact(path)


def publish_pictures(path: Path, data: ReportData, tracker: Tracker, title: str) -> None:
    """Gives a run the pictures that belong to a JSON, as `<name>.html`.

    Args:
        data: what the report's sections draw of it.
    """
    page = path.with_suffix(".html")
    write_atomically(page, render(data, ReportSettings(title=title)))
    tracker.log_artifact(page)
    page.unlink()
