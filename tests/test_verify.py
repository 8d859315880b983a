"""`eagle3 verify` and `eagle3 lineage` on a pipeline of two stages that needs a second to run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3.errors import HarnessError
from experiments import differences_text, lineage_command, verify_command
from experiments.differences import Difference, differences, environment_changes
from experiments.rerun import clone, in_order, inputs
from experiments.sameness import (
    BITWISE,
    DIFFERENT,
    NOT_COMPARED,
    UNKNOWN,
    WITHIN,
    compare_files,
    without_the_recorded,
)
from stages.dvc_files import Entry, digest_of_listing, folder_listing, read_lock
from stages.lineage import Lineage, Step, Target
from tests.small_pipeline import commit_all, dvc, git, path_with_python, write_pipeline

WEIGHTS = """
import json, os, time
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
noise = float(os.environ.get("NOISE", "0"))
folder = Path("checkpoints/a")
folder.mkdir(parents=True)
save_file({"w": np.arange(4, dtype=np.float32) + np.float32(noise), "b": np.ones(2)},
          folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps({"size": 4}))
Path("provenance").mkdir(exist_ok=True)
Path("provenance/train@a.json").write_text(json.dumps(
    {"stage": "train@a", "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
     "commit": "c", "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
     "mlflow_runs": [{"name": "train a", "run_id": "0123456789abcdef"}]}))
"""
SCORE = """
import json, time
from pathlib import Path
from safetensors.numpy import load_file
w = load_file("checkpoints/a/model.safetensors")["w"]
Path("metrics").mkdir(exist_ok=True)
Path("metrics/summary.json").write_text(json.dumps(
    {"tau": {"a": float(w.sum())}, "seconds": {"train@a": time.time()}}))
Path("provenance").mkdir(exist_ok=True)
Path("provenance/report.json").write_text(json.dumps(
    {"stage": "report", "started": "2020-01-01T00:00:00Z", "mlflow_runs": []}))
"""
DVC = """
stages:
  train:
    foreach: [a]
    do:
      cmd: python weights.py
      deps: [weights.py]
      params: [run]
      outs: [checkpoints/a, "provenance/train@a.json"]
  report:
    cmd: python score.py
    deps: [score.py, checkpoints/a]
    outs: ["provenance/report.json"]
    metrics: [{metrics/summary.json: {cache: false}}]
"""
FILES = {
    "weights.py": WEIGHTS,
    "score.py": SCORE,
    "dvc.yaml": DVC,
    "params.yaml": "run: {threads: 1}\nverify:\n  varies: ['metrics/summary.json:seconds.*']\n",
    ".gitignore": "/checkpoints\n/provenance\n/.work\n/mlflow.db*\n",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    write_pipeline(root, FILES)
    commit_all(root)
    dvc(root, "repro", "-q")
    return root


@pytest.fixture
def project(ran: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", path_with_python())
    monkeypatch.chdir(ran)
    return ran


def verified(
    project: Path, capsys: pytest.CaptureFixture[str], *asked: str
) -> tuple[int, dict[str, dict[str, str]], dict[str, list[object]] | None]:
    code = verify_command.run(project, list(asked), as_json=True, keep=False)
    printed = capsys.readouterr().out
    found = json.loads(printed)  # nothing else is on stdout
    return code, {item["path"]: item for item in found["outs"]}, found["environment"]


@pytest.mark.slow
def test_everything_comes_out_the_same(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = folder_listing(project / "checkpoints"), (project / "dvc.lock").read_bytes()
    code, outs, environment = verified(project, capsys)
    assert code == 0 and environment == {}
    # The time in the summary is another one, and is said to vary.
    assert {path: item["state"] for path, item in outs.items()} == {
        "checkpoints/a": BITWISE,
        "metrics/summary.json": BITWISE,
    }
    assert (folder_listing(project / "checkpoints"), (project / "dvc.lock").read_bytes()) == before
    assert not list((project / ".work").iterdir())


def test_what_a_killed_run_left_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the next one; what was kept on purpose stays, and so does what a living one works in."""
    work = tmp_path / ".work"
    with verify_command._folder(tmp_path, keep=True) as kept:
        (kept / "file").touch()
    assert f"kept: {kept}" in capsys.readouterr().err
    killed = (
        "import os, sys; from pathlib import Path; from experiments import verify_command as v;"
        "one = v._folder(Path(sys.argv[1]), False); one.__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    assert len(list(work.iterdir())) == 3  # the kept one, the dead one and its lock
    with verify_command._folder(tmp_path, keep=False) as living:
        assert set(work.glob("*")) == {kept, living, living.with_suffix(".lock")}
        with verify_command._folder(tmp_path, keep=False):
            assert living.is_dir()
        assert living.is_dir()
    assert list(work.iterdir()) == [kept] and (kept / "file").is_file()


def test_what_is_not_committed_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text(DVC)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("")
    git(tmp_path, "init", "-q")
    with pytest.raises(HarnessError, match=r"not\n[\s\S]*no commit yet[\s\S]*commit them"):
        clone(tmp_path, tmp_path / "place")
    git(tmp_path, "add", "dvc.yaml")
    git(tmp_path, "commit", "-qm", "x")
    with pytest.raises(HarnessError, match=r"without params.yaml, .dvc/config"):
        clone(tmp_path, tmp_path / "other")


def test_a_path_as_a_shell_completes_it() -> None:
    lock = {"a": Entry("a", "x", {}, {"checkpoints/a": "1.dir"}, {}, True)}
    for word in ("./checkpoints/a/", "checkpoints//a", "checkpoints/b/../a/config.json"):
        assert verify_command.select(lock, [word]) == ["a"]


@pytest.mark.slow
def test_what_differs_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOISE", "0.5")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    code, outs, environment = verified(project, capsys)
    assert code == 1
    first = "model.safetensors: tensor w: 4 of 4 values, by 0.5 at most"
    assert outs["checkpoints/a"]["state"] == DIFFERENT and outs["checkpoints/a"]["first"] == first
    # 0 + 1 + 2 + 3, and four times a half more.
    assert outs["metrics/summary.json"]["first"] == "tau.a: 6.0, now 8.0"
    assert environment == {"threads": [1, 3]}


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "state"), [("0", BITWISE), ("0.5", DIFFERENT)])
def test_in_a_clone_without_the_cache(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    noise: str,
    state: str,
) -> None:
    """What a stranger has: dvc.lock and no bytes. A digest alone says whether a folder is equal."""
    copy = tmp_path / "project"
    git(tmp_path, "clone", "-q", str(project), str(copy))
    shutil.copy(project / "dvc.lock", copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("NOISE", noise)
    code, outs, environment = verified(copy, capsys)
    assert environment is None  # no record to compare with: not "the same"
    assert code == (state == DIFFERENT) and outs["checkpoints/a"]["state"] == state
    # Its time is another one, and may be; whether more is different, nothing here tells.
    assert outs["metrics/summary.json"]["state"] == UNKNOWN


@pytest.mark.slow
def test_a_stage_alone_whose_inputs_are_not_here(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "project"
    git(tmp_path, "clone", "-q", str(project), str(copy))
    shutil.copy(project / "dvc.lock", copy)
    monkeypatch.chdir(copy)
    with pytest.raises(HarnessError, match=r"without checkpoints/a[\s\S]*`make repro` first"):
        verify_command.run(copy, ["report"], as_json=True, keep=False)
    assert not list((copy / ".work").iterdir())


@pytest.mark.slow
def test_one_stage_on_recorded_inputs(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint comes out of the cache: a train that would differ does not run."""
    monkeypatch.setenv("NOISE", "0.5")
    code, outs, _ = verified(project, capsys, "metrics/summary.json")
    assert code == 0 and list(outs) == ["metrics/summary.json"]


def test_what_was_read_from_outside_is_named() -> None:
    before, after = ({"commit": "c", "outside": {"/p.jsonl": digest}} for digest in "ab")
    assert environment_changes(before, after) == {"outside./p.jsonl": ("a", "b")}
    assert environment_changes({"commit": "c"}, after) == {}  # an older record


def test_a_verdict_in_words() -> None:
    same = verify_command.Found("train@a", "checkpoints/a", BITWISE)
    time = verify_command.Found("report", "metrics/x.json", NOT_COMPARED)
    assert (
        verify_command.as_text([same, time], {}, failed=False)
        == """\
checkpoints/a   bitwise
metrics/x.json  not compared

1 bitwise, 1 not compared
the same, to the bit
what is not compared is a time or follows from one: params.yaml, verify
commit, machine and versions are those of the recorded run"""
    )
    other = verify_command.Found("train@b", "checkpoints/b", DIFFERENT, "tensor w: 4 of 4 values")
    text = verify_command.as_text([same, other], {"threads": (1, 3)}, failed=False)
    assert "\nnot the same: first train@b made another checkpoints/b: tensor w: 4 of 4" in text
    assert text.endswith("what else is not as in the recorded run:\n  threads: 1 -> 3")
    text = verify_command.as_text([same], None, failed=False)
    assert text.endswith("is not here: what else changed is unknown") and "versions" not in text
    near = verify_command.Found("train@a", "metrics/a.json", WITHIN, "tau: 1.0, now 1.01")
    assert "the same within the tolerances" in verify_command.as_text([near], {}, failed=False)
    unknown = verify_command.Found("report", "metrics/x.json", UNKNOWN, "and the bytes")
    text = verify_command.as_text([same, unknown], {}, failed=False)
    assert "\nthe same, to the bit, but for what cannot be told: metrics/x.json\n" in text
    assert "a stage failed: what it says is above" in verify_command.as_text(
        [other], {}, failed=True
    )


def test_selection_and_order(project: Path) -> None:
    lock = read_lock(project)
    assert verify_command.select(lock, ["train"]) == ["train@a"]
    assert verify_command.select(lock, ["checkpoints/a/"]) == ["train@a"]
    assert verify_command.select(lock, []) == list(lock)
    with pytest.raises(HarnessError, match="makes this path"):
        verify_command.select(lock, ["nothing"])
    assert in_order(lock, ["report", "train@a"]) == ["train@a", "report"]
    assert inputs(lock, ["report"]) == ["checkpoints/a"]
    assert inputs(lock, ["train@a", "report"]) == []


def test_dvcs_digests(project: Path) -> None:
    listing = folder_listing(project / "checkpoints" / "a")
    assert digest_of_listing(listing) == read_lock(project)["train@a"].outs["checkpoints/a"]


def test_lineage_by_every_name(project: Path) -> None:
    lineage = Lineage(project)
    for asked, kind in (
        ("report", "stage"),
        ("tau.a", "metric"),
        ("metrics/summary.json", "path"),
    ):
        target = lineage.find(asked)
        assert (target.kind, target.entry.name) == (kind, "report")
    assert lineage.find("tau.a").value == 6.0
    run = lineage.find("01234567")
    assert (run.kind, run.entry.name) == ("run", "train@a")
    for asked in ("checkpoints/a/model.safetensors", "tests/../checkpoints/a"):
        assert lineage.find(asked).entry.name == "train@a"
    # A part of the key that is a stage's name leads there.
    assert lineage.find("seconds.train@a").entry.name == "train@a"
    with pytest.raises(HarnessError, match="nothing here has this origin"):
        lineage.find("0000000000")
    with pytest.raises(HarnessError, match="nothing here has this origin"):
        lineage.find("checkpoints/a/my notes.txt")  # DVC's list of the folder does not have it


def test_what_is_printed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lineage_command.run(project, "tau.a", None, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["value"] == 6.0
    assert [step["stage"] for step in printed["steps"]] == ["report", "train@a"]
    lineage_command.run(project, "tau.a", None, as_json=False)
    text = capsys.readouterr().out
    digest = read_lock(project)["train@a"].outs["checkpoints/a"]
    assert text.startswith("tau.a = 6.0") and "0123456789abcdef  train a" in text
    assert f"from    checkpoints/a  {digest[:12]}  train@a" in text
    lineage_command.run(project, "train@a", "tau.a", as_json=False)
    text = capsys.readouterr().out
    assert text.startswith("A  train@a      made by train@a, 2")
    assert "\nB  tau.a = 6.0  made by report, 2020-01-01T00:00:00Z\n" in text
    assert "Data\n  stages behind B only: report\n" in text and "Settings: the same" in text
    lineage_command.run(project, "train@a", "checkpoints/a", as_json=False)
    assert capsys.readouterr().out.endswith(
        "\nThe same origin: settings, code, data and results.\n"
    )
    lineage_command.run(project, "train@a", "report", as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "a": "train@a",
        "b": "report",
        "differences": [
            {"stage": "report", "kind": "stages", "name": "report", "a": None, "b": "report"}
        ],
    }


def arm(name: str, lr: float, **other: object) -> Step:
    """The training of an arm; `other` in its record."""
    kinds = [{"share": 1}, {"share": int(lr)}]
    return Step(
        f"train@{name}",
        {f"checkpoints/{name}": name * 20, "metrics/time.json": name},
        {f"data/{name}": (name * 20, None), "data/x": ("x", "extract")},
        {f"arms.{name}": {"lr": lr, "kinds": kinds}},
        {"commit": "c" * 40, "dirty": False, "threads": 1, "started": "then", **other},
    )


def test_two_arms_differ_in_what_is_theirs() -> None:
    found = list(differences([arm("a", 1)], [arm("b", 2, threads=2)]))
    assert found == [
        Difference("train@<arm>", "settings", "arms.<arm>.kinds.1.share", 1, 2),
        Difference("train@<arm>", "settings", "arms.<arm>.lr", 1, 2),
        Difference("train@<arm>", "data", "data/<arm>", "a" * 20, "b" * 20),
        Difference("train@<arm>", "machine", "threads", 1, 2),
        Difference("train@<arm>", "results", "checkpoints/<arm>", "a" * 20, "b" * 20),
        Difference("train@<arm>", "results", "metrics/time.json", "a", "b"),
    ]


def compared(one: Step, other: Step) -> str:
    sides = [
        (Target(step.stage, "stage", Entry(step.stage, "", {}, {}, {}, True)), [step])
        for step in (one, other)
    ]
    found = list(differences([one], [other]))
    return differences_text.as_text(sides[0], sides[1], found, ["metrics/time.*:*", "x.json:key"])


def test_a_difference_in_words() -> None:
    assert (
        compared(arm("a", 1), arm("b", 2, threads=2))
        == """\
A  train@a  made by train@a, then
B  train@b  made by train@b, then
<arm> stands for a in A and for b in B.

Settings
                            A  B
  arms.<arm>.kinds.1.share  1  2  read by train@<arm>
  arms.<arm>.lr             1  2  read by train@<arm>

Code: the same

Data
  train@<arm> reads another data/<arm>, which no stage makes: A aaaaaaaaaaaa, B bbbbbbbbbbbb

Machine
           A  B
  threads  1  2  in train@<arm>

Results
  train@<arm> made other checkpoints/<arm>"""
    )


def test_the_same_arm_at_another_commit() -> None:
    """Code counts where a file differs; a commit alone does not explain a result."""
    other = arm("a", 1, commit="d" * 40, dirty=True, gpu="one")
    text = compared(arm("a", 1), other)
    assert "A from cccccccccccc, B from dddddddddddd and uncommitted changes" in text
    assert "no file differs; the commits do" in text and "Settings: the same" in text
    assert "  gpu  not set  one  in train@a" in text
    assert text.endswith("Results: the same")
    edited = Step(other.stage, {"checkpoints/a": "other"}, other.needs, other.params, other.record)
    assert "other checkpoints/a, from the same settings, code and data" in compared(
        arm("a", 1), edited
    )
    record = {**other.record, "code": {"eagle3/loss.py": "1"}}
    edited = Step(other.stage, {"checkpoints/a": "other"}, other.needs, other.params, record)
    text = compared(arm("a", 1), edited)
    assert "train@a: other code in eagle3/loss.py\n  so the commits differ" in text
    assert "the same settings, code" not in text


def test_a_chain_has_digests_runs_and_reuse(project: Path) -> None:
    lineage = Lineage(project)
    report, train = lineage.chain(lineage.find("tau.a").entry)
    assert (report.stage, train.stage) == ("report", "train@a")
    assert report.needs["checkpoints/a"] == (train.outs["checkpoints/a"], "train@a")
    assert train.runs == ["0123456789abcdef"] and not train.reused
    # Its record says 2020, before its input was made: it came out of DVC's run cache.
    assert report.reused
    assert train.as_json()["params"] == {"run": {"threads": 1}}
    assert list(differences([train], [train])) == []


def test_an_earlier_run_is_found_in_the_run_cache(ran: Path, tmp_path: Path) -> None:
    """dvc.lock speaks of another run now; the old one's id still leads to what it read."""
    copy = tmp_path / "project"
    shutil.copytree(ran, copy)
    lock = (copy / "dvc.lock").read_text()
    (copy / "dvc.lock").write_text(
        lock.replace(read_lock(ran)["train@a"].outs["provenance/train@a.json"], "f" * 32)
    )
    target = Lineage(copy).find("0123456789")
    assert target.kind == "run" and not target.entry.current
    assert target.entry.outs["checkpoints/a"] == read_lock(ran)["train@a"].outs["checkpoints/a"]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("old", "new", "tolerances", "state", "first"),
    [
        ('{"a": [1, 2]}', '{"a": [1, 2]}', {}, BITWISE, ""),
        ('{"a": [1, 2]}', '{"a": [1, 3]}', {}, DIFFERENT, "a.1: 2, now 3"),
        ('{"a": 1.0}', '{"a": 1.01}', {"x.json:a": 0.02}, WITHIN, "a: 1.0, now 1.01"),
        ('{"a": 1.0}', '{"a": 1.03}', {"x.json:a": 0.02}, DIFFERENT, "a: 1.0, now 1.03"),
        ('{"a": 1, "t": 5}', '{"a": 1, "t": 6}', {"*:t": None}, BITWISE, ""),
        ('{"t": 5}', '{"t": 6}', {"*:t": None}, NOT_COMPARED, ""),
        ('{"a": 1}', '{"a": 1, "b": 2}', {}, DIFFERENT, "b: absent, now 2"),
        ('{"a": 1}', '{"a": true}', {"*": 9.0}, DIFFERENT, "a: 1, now true"),
    ],
)
def test_json_by_key(
    tmp_path: Path,
    old: str,
    new: str,
    tolerances: dict[str, float | None],
    state: str,
    first: str,
) -> None:
    one = written(tmp_path / "one" / "x.json", old)
    other = written(tmp_path / "other" / "x.json", new)
    verdict = compare_files(one, other, "x.json", tolerances)
    assert (verdict.state, verdict.first) == (state, first)


@pytest.mark.parametrize(
    ("name", "state"),
    [("a.timing.json", NOT_COMPARED), ("summary.json", UNKNOWN), ("a.json", DIFFERENT)],
)
def test_other_bytes_than_recorded_ones_that_are_gone(name: str, state: str) -> None:
    varies = {"*.timing.json:*": None, "summary.json:seconds.*": None}
    assert without_the_recorded(name, varies).state == state


def test_tensors_by_name_dtype_and_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_file({"a": np.zeros(2), "b": np.array([0.0, np.nan])}, one)
    save_file({"b": np.array([0.0, np.nan]), "a": np.zeros(2)}, other)
    assert compare_files(one, other, "x", {}).state == BITWISE  # NaN and order are no difference
    save_file({"a": np.zeros(2), "b": np.array([-0.0, np.nan])}, other)
    assert compare_files(one, other, "x", {}).first.startswith("tensor b: ")  # a sign of zero is
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros(2)}, other)
    said = compare_files(one, other, "x", {}).first
    assert said == "tensor a: torch.float64 [2], now torch.float32 [2]"
    save_file({"a": np.zeros(2)}, other)
    assert compare_files(one, other, "x", {}).first == "tensor b is in one of them only"


def test_entries_name_their_stage() -> None:
    cmd = "python -m stages.train --name train@x --arm x"
    assert Entry.of(None, {"cmd": cmd}, current=False).name == "train@x"
    assert Entry.of(None, {"cmd": "python -m stages.vocab --out y"}, current=False).name == "vocab"
