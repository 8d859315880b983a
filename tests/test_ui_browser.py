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
from mlflow.entities import Metric

from experiments.study.tracking import CHILDREN, child_run
from experiments.ui import first_page, free_port
from stages.notes import TAG
from stages.sending import open_client
from stages.tracking import MlflowTracker, Store
from tests.chromium import chromium, needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]
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
        page = re.sub(r"<(script|style).*?</\1>", "", self.dom(route), flags=re.DOTALL)
        return html.unescape(re.sub(r"(\s*<[^>]+>\s*)+", "|", page))

    def dom(self, route: str) -> str:
        """The page as the browser has it after its scripts have run."""
        shown, _ = chromium(
            self.profile,
            f"{self.address}/#/{route}",
            *("--window-size=3200,1400", f"--virtual-time-budget={MILLISECONDS}", "--dump-dom"),
        )
        return shown


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
    client, experiment = open_client(store)
    study = MlflowTracker(store, root / "journals", run_name="study default", tags={TAG: CHILDREN})
    runs["study default"] = str(study.run_id(120))
    study.log_artifact(report)
    for number in range(2):
        with child_run(root, f"scratch trial {number}", runs["study default"], {}) as trial:
            trial.log_metrics({"dev_tau": 1.25 + number}, 0)
    study.close()
    model = client.create_logged_model(
        experiment, name="drafter_scratch", source_run_id=runs["evaluate scratch"]
    )
    tau = Metric("tau.all", 1.5, 0, 0, model_id=model.model_id)
    client.log_batch(runs["evaluate scratch"], metrics=[tau])
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
    text = page.text(first_page(page.experiment))
    assert "Drafters for speculative decoding" in text
    for name in ("evaluate scratch", "evaluate finetune", "study default"):
        assert name in text
    for column in ("tau.all", "speedup", "kind", "arm", "Dataset", "Duration"):
        assert f"|{column}|" in text, column
    assert "|1.75|" in text and "|1.25|" in text  # finetune's tau, scratch's speed
    assert "|checkpoints/finetune" in text  # the dataset that it read
    # The menu for trainings, not the one for agents.
    assert "|Runs|" in text and "|Models|" in text and "Agent versions" not in text


def test_two_runs_are_compared(page: Page) -> None:
    pair = [page.runs["evaluate scratch"], page.runs["evaluate finetune"]]
    runs, experiments = quote(json.dumps(pair)), quote(json.dumps([page.experiment]))
    text = page.text(f"compare-runs?runs={runs}&experiments={experiments}")
    assert "Comparing 2 Runs" in text
    assert "evaluate scratch|evaluate finetune" in text
    for shown in ("tau.all", "evaluate.k", "1.75"):
        assert shown in text


def test_a_study_shows_its_children(page: Page) -> None:
    text = page.text(f"experiments/{page.experiment}/runs/{page.runs['study default']}")
    assert re.search(r"\|Child runs\|scratch trial 1\|,?\|?scratch trial 0\|", text), text
    assert CHILDREN in text
    # Among all runs, the children are folded into their study.
    rows = page.dom(first_page(page.experiment))
    assert "study default" in rows and "scratch trial" not in rows


def test_checkpoints_are_listed_with_their_metrics(page: Page) -> None:
    text = page.text(f"experiments/{page.experiment}/models?workflowType=machine_learning")
    assert "|drafter_scratch|" in text and "|evaluate scratch|" in text
    assert "|tau.all|" in text and "|1.5|" in text


def test_a_logged_report_opens(page: Page) -> None:
    run = page.runs["evaluate finetune"]
    shown = page.dom(f"experiments/{page.experiment}/runs/{run}/artifacts/report.html")
    assert "report.html" in shown
    (frame,) = re.findall(r"<iframe[^>]*>", shown)
    assert 'src="blob:' in frame, frame  # what is asked for below, in a sandbox
    address = f"{page.address}/get-artifact?path=report.html&run_uuid={run}"
    with urllib.request.urlopen(address) as answer:
        assert answer.read() == b"<h1>finetune accepts more</h1>"
