"""A training that is killed, or meets a torn file, a full disk, a NaN: it goes on or says why."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3 import resume, train_step, trainer
from eagle3.errors import HarnessError
from eagle3.resume import TrainingState, load_best, load_state, newest_good, save_best, save_state
from eagle3.schedule import plan_steps
from eagle3.settings import merged
from eagle3.tracking import NullTracker
from eagle3.train_settings import TrainSettings
from eagle3.train_step import TrainData
from eagle3.trainer import TrainResult, train
from tests.forking import Forks, forking
from tests.tiny_training import SETTINGS, make_data, make_drafter


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forking() as made:
        yield made


def assert_same_end(one: Path, other: Path) -> None:
    assert (one / "history.json").read_text() == (other / "history.json").read_text()
    a, b = (load_file(folder / "end.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    changes = {"accumulate": 2, "save_every": 2}
    began = time.monotonic()
    assert forks.run("train_in", whole, epochs=8, changes=changes) == [0]
    seconds = time.monotonic() - began
    draw, found = random.Random(), []
    for _ in range(8):
        after = draw.uniform(0.15, 0.8) * seconds
        codes = forks.run("train_in", torn, epochs=8, changes=changes, kill_after=after)
        if codes == [0] and not found:
            # Faster than the first run, which had all to load: once more, and earlier.
            shutil.rmtree(torn)
            seconds /= 2
            continue
        if codes == [0]:
            break
        assert codes == [-signal.SIGKILL]
        found.append(newest_good(torn / "work"))
    assert found, "killed at least once"
    assert forks.run("train_in", torn, epochs=8, changes=changes) == [0]
    assert_same_end(whole, torn)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "one bit", "facts", "best"])
def test_a_torn_state_is_passed_over(forks: Forks, tmp_path: Path, damage: str) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert forks.run("train_in", whole, epochs=2) == [0]
    assert forks.run("train_in", torn, epochs=2, stop_after=11) == [1]
    work = torn / "work"
    assert [path.name for path in sorted(work.glob("state-*"))] == [
        "state-00000006",
        "state-00000009",
    ]
    newest = work / "state-00000009"
    file = newest / "tensors.safetensors"
    if damage == "best":
        best = json.loads((newest / "about.json").read_text())["facts"]["best_step"]
        file = work / f"best-{best:08d}" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        data = data[:-10]
    else:
        data[len(data) // 2] ^= 4
    file.write_bytes(data)
    if damage == "facts":
        (newest / "about.json").write_text('{"step": 9, "fac')
    good = newest_good(work)
    assert good == 6 or (damage == "best" and good in (None, 3, 6))
    assert forks.run("train_in", torn, epochs=2) == [0]
    assert_same_end(whole, torn)


def state(step: int, best: int | None = None, size: int = 1) -> TrainingState:
    facts = {"best_step": best or 0, "best_tau": best and 1.5, "history": [["loss", step, 0.5]]}
    return TrainingState(step, {"w": torch.full((size,), float(step))}, facts)


def test_the_last_n_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, best in ((2, None), (4, 3), (6, 3), (8, 7), (10, 7)):
        if best == step - 1:
            save_best(tmp_path, best, {"w": torch.tensor([best])})
        save_state(tmp_path, state(step, best), keep_last=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best-00000003", "best-00000007"] + [f"state-{n:08d}" for n in (6, 8, 10)]
    save_state(tmp_path, state(12, 7), keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-00000007", "state-00000012"]
    assert newest_good(tmp_path) == 12
    assert load_state(tmp_path, 12).facts["history"] == [["loss", 12, 0.5]]
    assert load_best(tmp_path, 7)["w"].tolist() == [7]


def assert_intact_after_a_full_disk(folder: Path, error: HarnessError, errno: str) -> None:
    assert "could not be saved; the one before is intact" in str(error)
    assert errno in str(error)
    assert "make room" in str(error)
    assert sorted(path.name for path in folder.iterdir()) == ["state-00000002"]
    assert newest_good(folder) == 2
    assert load_state(folder, 2).tensors["w"].tolist() == [2.0]


@pytest.mark.parametrize("save", ["state", "best"])
def test_a_file_that_may_not_grow(tmp_path: Path, save: str) -> None:
    save_state(tmp_path, state(2), keep_last=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(HarnessError) as caught:
            if save == "state":
                save_state(tmp_path, state(4, size=100_000), keep_last=2)
            else:
                save_best(tmp_path, 4, {"w": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert_intact_after_a_full_disk(tmp_path, caught.value, "os error 27")


def test_a_full_disk(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        save_state(tmp_path, state(2), keep_last=2)
        with pytest.raises(HarnessError) as caught:
            save_state(tmp_path, state(4, size=100_000), keep_last=2)
        assert_intact_after_a_full_disk(tmp_path, caught.value, "os error 28")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_files_are_on_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(resume, "flush_to_disk", lambda path: said.append(f"flush {path.name}"))
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda a, b: (said.append(f"rename {b.name}"), rename(a, b))[1]
    )
    save_best(tmp_path, 3, {"w": torch.zeros(2)})
    assert said == [
        "flush tensors.safetensors",
        "flush .best-00000003.part",
        "rename best-00000003",
        f"flush {tmp_path.name}",
    ]


def run(
    work: Path, data: TrainData | None = None, epochs: int = 3, **changes: Any
) -> tuple[TrainResult, dict[str, torch.Tensor]]:
    drafter = make_drafter().float()
    result = train(
        drafter,
        data or make_data(drafter),
        TrainSettings.model_validate(merged(SETTINGS.model_dump(), changes)),
        seed=0,
        tokens=None,
        epochs=epochs,
        device=torch.device("cpu"),
        work=work,
        tracker=NullTracker(),
    )
    return result, drafter.state_dict()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_stop_at_their_step(tmp_path: Path, value: float) -> None:
    """The sample is named, and nothing of its step is kept."""
    data = make_data(make_drafter().float())
    data.documents[17].aux[4] = value
    with pytest.raises(HarnessError, match="NaN or infinity") as caught:
        run(tmp_path, data, save_every=1, noise={"kind": "none"})
    assert "samples 0-17\n" in str(caught.value)
    step = newest_good(tmp_path)
    assert step is not None
    assert all(value.isfinite().all() for value in load_state(tmp_path, step).tensors.values())
    plan = plan_steps(
        data.lengths, batch_tokens=64, max_length=2048, accumulate=1, seed=0, tokens=None, epochs=3
    )
    assert 17 in plan[step].batches[0], "the step after the last saved one read it"


def test_a_broken_sample_spoils_no_scale_of_noise(tmp_path: Path) -> None:
    data = make_data(make_drafter().float())
    data.documents[17].aux[4] = float("nan")
    with pytest.raises(HarnessError, match="NaN or infinity") as caught:
        run(tmp_path, data)
    assert "samples 0-17\n" in str(caught.value)
    assert newest_good(tmp_path) is None, "before the first step: the scales come from all samples"


def test_an_infinite_loss_names_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are finite; of two passes in the step, the samples of the broken one are named."""
    calls: list[list[str]] = []

    def broken(drafter: Any, *, batch: Any, **rest: Any) -> Any:
        outcome = objective(drafter, batch=batch, **rest)
        calls.append(list(batch.ids))
        if len(calls) == 4:
            return replace(outcome, loss=outcome.loss * float("inf"))
        return outcome

    objective = train_step.objective
    monkeypatch.setattr(train_step, "objective", broken)
    with pytest.raises(HarnessError, match="the loss is not finite") as caught:
        run(tmp_path, accumulate=2)
    assert f"samples {', '.join(calls[3])}\n" in str(caught.value)
    assert len(calls) == 4


def test_a_gradient_that_is_not_finite_stops_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "clip", lambda parameters, most: float("nan"))
    with pytest.raises(HarnessError, match="the gradient is not finite"):
        run(tmp_path)


def test_early_stopping_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """τ peaks at the third of ten evaluations; after two more without gain it is over, and the
    weights are the third's. Killed in between, it stops at the same step."""
    taus = iter([1.1, 1.2, 1.5, 1.4, 1.5])

    def evaluated(learner: Any, progress: Any, tracker: Any) -> float:
        tau = next(taus)
        progress.record(NullTracker(), {"dev_tau": tau})
        return tau

    monkeypatch.setattr(trainer, "_evaluate", evaluated)
    settings = {"evaluations": 10, "patience": 2, "save_every": 1}
    result, weights = run(tmp_path / "a", **settings)
    assert result.stopped_early
    history = [(step, value) for name, step, value in result.history if name == "dev_tau"]
    assert [value for _, value in history] == [1.1, 1.2, 1.5, 1.4, 1.5]
    assert (result.best_step, result.best_tau) == (history[2][0], 1.5)
    assert result.steps == history[4][0]
    for name, value in load_best(tmp_path / "a", result.best_step).items():
        assert torch.equal(weights[name], value)

    taus = iter([1.1, 1.2, 1.5, 1.4])
    with pytest.raises(StopIteration):  # no fifth value: the run dies there
        run(tmp_path / "b", **settings)
    taus = iter([1.5])
    again, same = run(tmp_path / "b", **settings)
    assert again == result
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_early_stopping_needs_dev_samples(tmp_path: Path) -> None:
    data = replace(make_data(make_drafter().float()), dev=[])
    with pytest.raises(HarnessError, match="early stopping needs samples"):
        run(tmp_path, data, patience=2)


def test_without_patience_it_trains_to_the_end(tmp_path: Path) -> None:
    result, _ = run(tmp_path)
    assert not result.stopped_early
    assert result.steps == max(step for _, step, _ in result.history)
