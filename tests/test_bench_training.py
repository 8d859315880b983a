"""The training benchmark: turn-taking, the same work for both, and what it makes of rounds."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.tracking import NullTracker
from eagle3.trainer import train
from experiments.benchmarks import training, training_task
from experiments.benchmarks.rounds import Measured
from experiments.benchmarks.training import Plan, compared, run_length, score
from experiments.benchmarks.training_task import SEED, made_up, read_task, write_task

CHILD = """
    import sys
    from experiments.benchmarks.rounds import Turns
    turns = Turns()
    print("noise")  # must not be taken for a report
    turns.begin()
    for number in range(3):
        kept = b"x" * (100 << 20) if number == 1 else None
        sum(range(200_000))
        turns.end()
        turns.begin()
    sys.exit(int(sys.argv[1]))
"""


def child(root: Path, log: Path, code: int) -> Measured:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(code)]
    return Measured(command, env={}, cwd=root, log=log)


def test_a_process_works_in_rounds(project_root: Path, tmp_path: Path) -> None:
    measured = child(project_root, tmp_path / "log", 0)
    rounds = [measured.round() for _ in range(3)]
    assert all(report["cpu_s"] > 0 and report["wall_s"] > 0 for report in rounds)
    assert rounds[1]["peak_rss"] - rounds[0]["peak_rss"] > 90 << 20
    measured.finish()
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_process_that_fails_says_why(project_root: Path, tmp_path: Path) -> None:
    measured = child(project_root, tmp_path / "log", 3)
    for _ in range(3):
        measured.round()
    with pytest.raises(RuntimeError, match="noise"):
        measured.round()


def test_ratios_are_medians_over_rounds() -> None:
    mine = {
        "trainer": "eagle3", "documents": "real", "length": 8, "peak_rss_gib": 1.0, "loss": 2.0,
        "tokens_per_s_of_rounds": [4.0, 9.0, 10.0], "tokens_per_cpu_s_of_rounds": [2.0, 2.0, 2.0],
    }  # fmt: skip
    theirs = {
        "trainer": "speculators", "documents": "real", "length": 8, "peak_rss_gib": 2.0,
        "loss": 2.5,
        "tokens_per_s_of_rounds": [1.0, 3.0, 1.0], "tokens_per_cpu_s_of_rounds": [1.0, 2.0, 1.0],
    }  # fmt: skip
    others = [{**mine, "length": 64}, {**mine, "documents": "made up"}]
    assert compared([mine, theirs, *others]) == [
        {
            "documents": "real", "length": 8, "tokens_per_s_ratio": 4.0,
            "tokens_per_cpu_s_ratio": 2.0, "peak_rss_ratio": 0.5, "loss_difference": -0.5,
        }
    ]  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes small enough for seconds."""
    small = training_task.SMALL.model_copy(
        update={
            "hidden_size": 32, "vocab_size": 120, "intermediate_size": 48, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }
    )  # fmt: skip
    monkeypatch.setattr(training_task, "SMALL", small)
    monkeypatch.setattr(training_task, "DRAFT_VOCABULARY", 64)
    monkeypatch.setattr(training_task, "ALPHABET", 20)


def test_made_up_targets_are_what_the_head_says(tiny: None, tmp_path: Path) -> None:
    source = made_up(40)
    head = source.head.lm_head
    for document in source.documents:
        normed = torch.nn.functional.rms_norm(document.final.float(), [32], eps=1e-5)
        logits = normed @ head.T
        assert (logits.argmax(-1) == document.verifier_top1).float().mean() > 0.9
        torch.testing.assert_close(logits.logsumexp(-1), document.verifier_lse, rtol=0.02, atol=0)
    write_task(tmp_path, source, length=40, rounds=2, round_steps=3, lr=0.01)
    task = read_task(tmp_path)
    assert task.round_tokens == [120, 120]
    assert len(task.data.documents) == 8
    assert len(task.held_out) == 2
    trained = {document.token_ids.numpy().tobytes() for document in task.data.documents}
    assert not any(document.token_ids.numpy().tobytes() in trained for document in task.held_out)


@pytest.mark.slow
def test_both_trainers_end_at_the_same_loss(
    tiny: None, project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ROOT", project_root)
    pythons = {"eagle3": sys.executable}
    peer = project_root / ".venv-speculators" / "bin" / "python"
    if peer.exists():
        pythons["speculators"] = str(peer)
    plan = Plan(rounds=3, steps=8, long_steps=1, threads=1, lr=0.003)
    rows, first_loss = run_length(tmp_path, made_up(64), 64, pythons, plan)
    for row in rows:
        assert row["tokens"] == 4 * 8 * 64
        assert row["loss"] < first_loss - 0.5
        assert len(row["tokens_per_s_of_rounds"]) == 3
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=0.02)
    # Rounds change nothing: the plain loop ends at the same bits.
    task = read_task(tmp_path)
    drafter = task.drafter({})
    train(
        drafter, task.data, task.settings, seed=SEED, tokens=sum(task.round_tokens), epochs=None,
        device=torch.device("cpu"), work=tmp_path, tracker=NullTracker(),
    )  # fmt: skip
    ended = load_file(tmp_path / "eagle3.safetensors")
    assert ended.keys() == {n for n, p in drafter.named_parameters() if p.requires_grad}
    for name, value in drafter.named_parameters():
        if name in ended:
            assert torch.equal(ended[name], value), name
    assert score(task, ended) == pytest.approx(rows[0]["loss"], abs=1e-5)
