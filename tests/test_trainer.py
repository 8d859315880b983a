"""Training: it learns, repeats to the bit, and replays what decoding would do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.acceptance import acceptance_length, summarise
from eagle3.dataset import Document
from eagle3.drafter import DraftCache, Drafter
from eagle3.noise import NoiseSettings, add_noise, layer_scales
from eagle3.packing import pack, packed_order
from eagle3.replay import replay, walk
from eagle3.schedule import learning_rate, plan_steps
from eagle3.tracking import NullTracker
from eagle3.trainer import train
from tests.tiny_training import (
    SETTINGS,
    make_data,
    make_documents,
    make_drafter,
)


def run(work: Path, epochs: int = 6) -> tuple[Drafter, list[tuple[str, int, float]]]:
    drafter = make_drafter().float()
    result = train(
        drafter,
        make_data(drafter),
        SETTINGS,
        seed=5,
        tokens=None,
        epochs=epochs,
        device=torch.device("cpu"),
        work=work,
        tracker=NullTracker(),
    )
    return drafter, result.history


def test_it_learns(tmp_path: Path) -> None:
    drafter, history = run(tmp_path, epochs=20)
    losses = [value for name, _, value in history if name == "divergence_0"]
    taus = [value for name, _, value in history if name == "dev_tau"]
    assert losses[-1] < 0.5 * losses[0]
    assert taus[-1] > taus[0]
    counts = replay(drafter, make_documents(6, seed=1, tail=4), 2, dtype=torch.float32)
    assert summarise(counts)["tau"] == max(taus)


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    first, one = run(tmp_path / "a")
    second, two = run(tmp_path / "b")
    assert one == two
    for (name, a), (_, b) in zip(
        first.state_dict().items(), second.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_replay_is_chain_drafting_row_by_row(tmp_path: Path) -> None:
    """Against a plain loop with the cached drafter: draft k, compare, move on."""
    drafter = run(tmp_path, epochs=12)[0].double()
    total = 0
    documents = make_documents(5, seed=2, tail=4)
    k = 3
    for count, document in zip(
        replay(drafter, documents, k, dtype=torch.float64), documents, strict=True
    ):
        tokens, aux = document.token_ids.long(), document.aux.double()
        answer = document.loss_mask.nonzero()[:, 0]
        row, last = int(answer[0]) - 1, int(answer[-1])
        steps, positions = 0, [0] * k
        while row + 1 < last:
            cache = DraftCache()
            places = torch.arange(row + 1)
            with torch.no_grad():
                out = drafter.forward_cached(
                    tokens[1 : row + 2], drafter.fuse(aux[: row + 1]), places, cache
                )[-1:]
                accepted = 0
                for i in range(k):
                    draft = int(drafter.target_ids(drafter.logits(out)[0].argmax()))
                    if row + 2 + i >= len(tokens) or draft != int(tokens[row + 2 + i]):
                        break
                    positions[i] += 1
                    accepted += 1
                    out = drafter.forward_cached(
                        torch.tensor([draft]), out, torch.tensor([row + 1 + i]), cache
                    )
            steps += 1
            row += accepted + 1
        assert count.verify_steps == steps
        assert count.accepted_per_position == positions
        assert count.accepted == sum(positions)
        assert count.drafted == k * steps
        total += count.accepted
    assert total > 10


def test_the_walk_by_hand() -> None:
    document = make_documents(1)[0]
    mask = torch.zeros(12, dtype=torch.uint8)
    mask[3:10] = 1  # answer at 3..9, tail of 2
    document = Document(**{**vars(document), "loss_mask": mask})
    # Row 2: 2 accepted -> row 5: 0 -> row 6: 0 -> row 7: 2, the second past the end -> done.
    accepted = [9, 9, 2, 9, 9, 0, 0, 2, 9, 9, 9, 9]
    count = walk(document, accepted, 3)
    assert (count.verify_steps, count.accepted, count.drafted, count.tokens) == (4, 4, 12, 7)
    assert count.accepted_per_position == [2, 2, 0]
    assert acceptance_length(count.accepted, count.verify_steps) == 2.0


def test_epochs_read_every_document_once_and_fill_batches() -> None:
    lengths = [7, 30, 5, 12, 9, 50, 3]
    order = packed_order(lengths, 32, 40, seed=1, epoch=0)
    assert sorted(i for batch in order for i in batch) == list(range(7))
    assert order != packed_order(lengths, 32, 40, seed=1, epoch=1)
    for batch in order:
        assert len(batch) == 1 or sum(min(lengths[i], 40) for i in batch) <= 32
    plan = plan_steps(
        lengths,
        batch_tokens=32,
        max_length=40,
        accumulate=2,
        seed=1,
        tokens=150,
        epochs=None,
    )
    assert plan[-1].tokens_after >= 150 > plan[-2].tokens_after


def test_no_documents_make_no_plan() -> None:
    """Passes over nothing would never reach a budget; training then says that there is nothing."""
    for tokens, epochs in ((150, None), (None, 2)):
        assert not plan_steps(
            [], batch_tokens=32, max_length=40, accumulate=1, seed=1, tokens=tokens, epochs=epochs
        )


def test_learning_rates_by_hand() -> None:
    def rates(kind: str) -> list[float]:
        return [
            learning_rate(i, 10, peak=1.0, scheduler=kind, warmup_ratio=0.2)  # type: ignore[arg-type]
            for i in range(10)
        ]

    assert rates("constant") == [0.5] + [1.0] * 9
    assert rates("linear")[2:] == pytest.approx([1 - i / 8 for i in range(8)])
    assert rates("cosine")[6] == pytest.approx(0.5)


def test_noise_depends_on_run_epoch_and_sample_alone() -> None:
    documents = make_documents(3)
    settings = NoiseSettings(kind="uniform_abs", std=0.05)
    scales = layer_scales(documents)

    def noisy(order: list[int], epoch: int, chosen: NoiseSettings = settings) -> torch.Tensor:
        batch = pack([documents[i] for i in order], 100)
        rows = add_noise(batch, chosen, scales, seed=1, epoch=epoch)
        place = order.index(0)
        return rows[batch.spans[place][0] : batch.spans[place][1]].float()

    assert torch.equal(noisy([0, 1], 0), noisy([2, 0], 0))
    assert not torch.equal(noisy([0, 1], 0), noisy([0, 1], 1))
    clean = documents[0].aux.float()
    assert (noisy([0], 0) - clean).abs().max() <= 0.05 + 0.02  # and bfloat16's own rounding
    wide = noisy([0], 0, NoiseSettings(kind="gaussian_relative", std=0.5)) - clean
    expected = 0.5 * scales
    assert wide.std(dim=(0, 2)) == pytest.approx(expected.tolist(), rel=0.25)
    batch = pack(documents, 100)
    assert torch.equal(add_noise(batch, NoiseSettings(), None, seed=1, epoch=0), batch.aux_NPG)
