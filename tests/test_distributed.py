"""Two processes train what one would have trained: same batches, same curve, same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.errors import HarnessError
from eagle3.objective import ObjectiveSettings, _asked, supervised_in
from eagle3.packing import pack
from eagle3.parallel import refuse_idle_ranks
from eagle3.ranks import ALONE, Ranks
from eagle3.resume import newest_good
from eagle3.schedule import plan_steps
from tests.forking import Forks, forking
from tests.tiny_training import make_data, make_documents, make_drafter, vocabulary_of

CHANGES: dict[str, Any] = {"accumulate": 3, "objective": {"outside_rows": "drop"}}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with forking() as made:
        yield made


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training that all others are compared with: one process, three passes a step."""
    folder = tmp_path_factory.mktemp("alone")
    assert forks.run("train_in", folder, changes=CHANGES) == [0]
    return folder


def assert_close(one: Path, other: Path, rel: float = 1e-5) -> None:
    a, b = (json.loads((folder / "history.json").read_text()) for folder in (one, other))
    assert [point[:2] for point in a] == [point[:2] for point in b]
    for (name, step, value), (_, _, expected) in zip(a, b, strict=True):
        assert value == pytest.approx(expected, rel=rel, abs=rel), (name, step)
    weights, expected_weights = (load_file(folder / "end.safetensors") for folder in (one, other))
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == expected_weights[name].dtype
        torch.testing.assert_close(tensor, expected_weights[name], rtol=10 * rel, atol=rel)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_one(
    forks: Forks, alone: Path, tmp_path: Path, parallel: str, head: str
) -> None:
    """Curve, weights and batches; one of the two has nothing to do in every second round."""
    changes = CHANGES | {"drafter": {"head": head}}
    if head == "frozen":
        alone = tmp_path / "alone"
        assert forks.run("train_in", alone, changes=changes) == [0]
    two = tmp_path / "two"
    codes = forks.run("train_in", two, ranks=2, changes=changes | {"parallel": parallel})
    assert codes == [0, 0], (two / "stderr-0").read_text() + (two / "stderr-1").read_text()
    assert_close(two, alone)
    data = make_data(make_drafter())
    plan = plan_steps(
        data.lengths, batch_tokens=64, max_length=2048, accumulate=3, seed=5, tokens=None, epochs=3
    )
    wanted = [[f"0-{i}" for i in batch] for step in plan for batch in step.batches]
    assert packed(alone / "read-0.json") == wanted
    first, second = (packed(two / f"read-{rank}.json") for rank in (0, 1))
    dealt = []
    for step in plan:
        sides = [first, second]
        dealt += [sides[place % 2].pop(0) for place in range(len(step.batches))]
    assert dealt == wanted and not first and not second
    assert "training" in (two / "stderr-0").read_text()
    assert (two / "stderr-1").read_text() == "", "only the leader speaks"


def packed(file: Path) -> list[list[str]]:
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "rel"), [("ddp", 1e-5), ("fsdp", 1e-3)])
def test_two_processes_are_one_with_muon(
    forks: Forks, tmp_path: Path, parallel: str, rel: float
) -> None:
    """Muon multiplies whole matrices in bfloat16: put together from parts, they round otherwise."""
    alone, two = tmp_path / "alone", tmp_path / "two"
    changes = CHANGES | {"optimizer": "muon"}
    assert forks.run("train_in", alone, changes=changes) == [0]
    codes = forks.run("train_in", two, ranks=2, changes=changes | {"parallel": parallel})
    assert codes == [0, 0], (two / "stderr-0").read_text() + (two / "stderr-1").read_text()
    assert_close(two, alone, rel)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_taken_up_by_another_number_of_processes(
    forks: Forks, alone: Path, tmp_path: Path, before: int, after: int, parallel: str
) -> None:
    changes = CHANGES | {"parallel": parallel}
    codes = forks.run("train_in", tmp_path, ranks=before, changes=changes, stop_after=8)
    assert codes == [1] * before
    assert newest_good(tmp_path / "work") == 6
    assert forks.run("train_in", tmp_path, ranks=after, changes=changes) == [0] * after
    assert_close(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_state_is_whole_and_the_same_whoever_wrote_it(
    forks: Forks, tmp_path: Path, parallel: str
) -> None:
    states = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        changes = CHANGES | {"parallel": parallel}
        forks.run("train_in", folder, ranks=ranks, changes=changes, stop_after=7)
        states.append(load_file(folder / "work" / "state-00000006" / "tensors.safetensors"))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-4, atol=1e-6)
    assert "fc.weight" in states[0] and "optimizer.fc.weight.exp_avg_sq" in states[0]


@pytest.mark.slow
def test_a_broken_sample_of_one_rank_ends_all(forks: Forks, tmp_path: Path) -> None:
    """The second of three batches of a step is rank 1's: both stop at that step, and name it."""
    data = make_data(make_drafter())
    plan = plan_steps(
        data.lengths, batch_tokens=64, max_length=2048, accumulate=3, seed=5, tokens=None, epochs=3
    )
    broken = f"0-{plan[1].batches[1][0]}"
    changes = CHANGES | {"noise": {"kind": "none"}}
    codes = forks.run("train_in", tmp_path, ranks=2, changes=changes, broken={broken: float("nan")})
    assert codes == [2, 2]
    for rank in (0, 1):
        assert f"samples {broken}\n" in (tmp_path / f"stderr-{rank}").read_text()
    assert len(packed(tmp_path / "read-1.json")) == 2, "one batch a step, and the broken one"


@pytest.mark.slow
def test_an_error_of_the_leader_ends_all(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "work" / ".state-00000003.part").mkdir(parents=True)
    (tmp_path / "work" / "state-00000003").write_text("a file where the state's folder goes")
    codes = forks.run("train_in", tmp_path, ranks=2, changes=CHANGES)
    assert codes == [2, 2]
    assert "could not be saved" in (tmp_path / "stderr-0").read_text()
    assert "rank 0 stopped" in (tmp_path / "stderr-1").read_text()


@pytest.mark.parametrize("outside", ["keep", "drop"])
def test_rows_are_counted_without_states(outside: str) -> None:
    documents = make_documents(7, tail=3)
    vocabulary = vocabulary_of(make_drafter())
    settings = ObjectiveSettings(ttt_steps=4, outside_rows=outside)  # type: ignore[arg-type]
    batch = pack(documents, 12)
    asked = _asked(batch, vocabulary.draft_of[batch.top1_N], settings)
    counted = supervised_in(documents, vocabulary, settings, max_length=12)
    assert counted == [int(rows.sum()) for rows in asked]
    # By hand, of one document of 12 rows or more, answered from row 3 on: the row of target
    # position j is there for 3 <= j <= 10 at step 0.
    one = supervised_in(documents[:1], vocabulary, ObjectiveSettings(ttt_steps=1), max_length=12)
    mask = documents[0].loss_mask[:12]
    assert one == [int(mask[1:-1].sum())]


def test_more_processes_than_passes_are_refused() -> None:
    refuse_idle_ranks(Ranks(0, 3), 3)
    with pytest.raises(HarnessError, match=r"nothing to do[\s\S]*train.accumulate[\s\S]*got: 3"):
        refuse_idle_ranks(Ranks(0, 4), 3)


def test_alone_nothing_is_said_to_anybody() -> None:
    assert ALONE.on_leader(lambda: 7) == 7
    assert ALONE.gather("a") == ["a"]
    assert ALONE.sum(torch.tensor(2.5)).item() == 2.5
    with pytest.raises(ZeroDivisionError):
        ALONE.on_leader(lambda: 1 / 0)
