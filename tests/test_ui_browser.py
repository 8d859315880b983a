"""MLflow's real page in a real browser, over runs such as the pipeline makes.

Chromium is a program of the system; where there is none, these tests say so and are skipped.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from experiments.ui import VIEW, free_port
from stages.sending import open_client
from stages.tracking import MlflowTracker, Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (chromium on PATH)"),
]
CLI = [sys.executable, "-c", "from experiments.cli import main; main()"]
MILLISECONDS = 20_000  # of the page's own clock, which does not wait where nothing happens


@dataclass
class Page:
    """A served store: its address, and the ids of its runs by name."""

    address: str
    experiment: str
    runs: dict[str, str]
    profile: Path

    def text(self, route: str) -> str:
        """What a wide window shows at a route, tags left out."""
        assert CHROMIUM is not None
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--user-data-dir={self.profile}",
                "--window-size=3200,1400",
                f"--virtual-time-budget={MILLISECONDS}",
                "--dump-dom",
                f"{self.address}/#/{route}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        page = re.sub(r"<(script|style).*?</\1>", "", done.stdout, flags=re.DOTALL)
        return html.unescape(re.sub(r"(\s*<[^>]+>\s*)+", "|", page))


@pytest.fixture(scope="module")
def page(
    tmp_path_factory: pytest.TempPathFactory, empty_store: Path, project_root: Path
) -> Iterator[Page]:
    root = tmp_path_factory.mktemp("ui")
    (root / "dvc.yaml").write_text("stages: {}\n")
    shutil.copy(empty_store, root / "mlflow.db")
    store = Store(f"sqlite:///{root / 'mlflow.db'}", root / "mlartifacts")
    runs = {}
    report = root / "report.html"
    report.write_text("<h1>finetune accepts more</h1>")
    for arm, tau in (("scratch", 1.5), ("finetune", 1.75)):
        tracker = MlflowTracker(
            store,
            root / "journals",
            run_name=f"evaluate {arm}",
            tags={"kind": "evaluate", "arm": arm, f"data.checkpoints/{arm}": "0" * 32},
        )
        tracker.log_params({"arm": arm, "evaluate.k": 3})
        tracker.log_metrics({"tau.all": tau, "speedup": tau - 0.25}, 0)
        tracker.log_artifact(report)
        runs[f"evaluate {arm}"] = str(tracker.close()["run_id"])
    _, experiment = open_client(store)
    port = free_port(0)
    served = subprocess.Popen(
        [*CLI, "ui", "--port", str(port)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(project_root)},
    )
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                assert time.monotonic() < deadline and served.poll() is None
                time.sleep(0.3)
        yield Page(f"http://127.0.0.1:{port}", experiment, runs, root / "browser")
    finally:
        served.send_signal(signal.SIGTERM)
        served.wait(timeout=60)


def test_the_first_page_lists_runs_with_our_columns(page: Page) -> None:
    text = page.text(f"experiments/{page.experiment}/runs?viewStateShareKey={VIEW}")
    assert "Drafters for speculative decoding" in text
    for name in ("evaluate scratch", "evaluate finetune"):
        assert name in text
    for column in ("tau.all", "speedup", "kind", "arm", "Dataset", "Duration"):
        assert f"|{column}|" in text, column
    assert "|1.75|" in text and "|1.25|" in text  # finetune's tau, scratch's speed
    assert "|checkpoints/finetune" in text  # the dataset that it read


def test_two_runs_are_compared(page: Page) -> None:
    runs = quote(json.dumps(list(page.runs.values())))
    experiments = quote(json.dumps([page.experiment]))
    text = page.text(f"compare-runs?runs={runs}&experiments={experiments}")
    assert "Comparing 2 Runs" in text
    assert "evaluate scratch|evaluate finetune" in text
    for shown in ("tau.all", "evaluate.k", "1.75"):
        assert shown in text


def test_a_logged_report_opens(page: Page) -> None:
    run = page.runs["evaluate finetune"]
    text = page.text(f"experiments/{page.experiment}/runs/{run}/artifacts/report.html")
    assert "report.html" in text
    address = f"{page.address}/get-artifact?path=report.html&run_uuid={run}"
    with urllib.request.urlopen(address) as answer:
        assert answer.read() == b"<h1>finetune accepts more</h1>"
