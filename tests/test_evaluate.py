"""Evaluation on a tiny verifier: counts against real decoding, exactness, speeds that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.acceptance import (
    PromptCounts,
    by_benchmark,
    distinct_share,
    read_counts,
    summarise,
    write_counts,
)
from eagle3.cached_verifier import CachedVerifier
from eagle3.checkpoint import save_drafter
from eagle3.dataset import Document, StatesDataset, StatesMeta
from eagle3.decode import Decoded, plain_decode
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.evaluate import EvaluateSettings, Subject, acceptance_summary, check_states
from eagle3.exactness import Parting, check_near_tie, parting
from eagle3.local_decoding import exact_decoding, prompt_of, spread_prompts, timed_decoding
from eagle3.replay import replay
from eagle3.shard_writer import ShardWriter
from eagle3.timing import Run, measure
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head, write_head
from tests.tiny import tiny_drafter_config

AUX, TOKENS, TAIL = (0, 2, 3), 24, 8


@pytest.fixture(scope="module")
def subject(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("subject")
    spec = VerifierSpec.open(tiny_verifier)
    write_head(spec, folder / "head.safetensors")
    head = read_head(folder / "head.safetensors")
    config = tiny_drafter_config(spec.vocab_size, spec.vocab_size // 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = Drafter(config, head.embed.float())
    drafter.d2t += torch.arange(config.draft_vocab_size)  # the even tokens
    drafter.t2d[::2][: config.draft_vocab_size] = True
    save_drafter(folder / "checkpoint", drafter, head.config, torch.float32)
    return Subject(spec, head, folder / "checkpoint", "cpu")


@pytest.fixture(scope="module")
def states(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> StatesDataset:
    """Greedy fp32 answers of six prompts of two benchmarks."""
    folder = tmp_path_factory.mktemp("states")
    meta = StatesMeta(
        verifier=subject.head.config.verifier,
        config_hash=subject.head.config.config_hash,
        engine="test",
        engine_version="0",
        aux_layers=list(AUX),
        final_hidden="post_norm",
        dtype="float32",
        hidden_size=64,
        vocab_size=subject.spec.vocab_size,
    )
    writer = ShardWriter(folder, meta)
    verifier = CachedVerifier(subject.model(torch.float32), AUX)
    for number in range(6):
        prompt = list(range(10 + 7 * number, 20 + 9 * number))
        answer = plain_decode(verifier, prompt, max_tokens=TOKENS + TAIL).token_ids
        ids = torch.tensor(prompt + answer)
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        mask[len(prompt) : len(prompt) + TOKENS] = 1
        verifier.reset()
        writer.add(
            Document(
                id=f"p{number}",
                source="mt_bench" if number < 2 else "human_eval",
                token_ids=ids.int(),
                loss_mask=mask,
                aux=verifier.forward(ids, 1).aux_NLH.clone(),
                final=torch.zeros(len(ids), 64),
                verifier_top1=ids.int(),
                verifier_lse=torch.zeros(len(ids)),
            )
        )
    writer.finish()
    return StatesDataset.open(folder)


def test_replay_and_decoding_count_alike(subject: Subject, states: StatesDataset) -> None:
    settings = EvaluateSettings(decode_prompts=6, decode_tokens=TOKENS)
    drafter = subject.drafter(torch.float32)
    counts = {item.id: item for item in replay(drafter, states, 3, dtype=torch.float32)}
    prompts = spread_prompts(states, 6)
    exact = exact_decoding(subject, prompts, settings)
    for prompt, got in zip(prompts, exact.speculative, strict=True):
        if len(got.token_ids) < TOKENS:  # an EOS: the states' answers run on past it
            continue
        assert counts[prompt.id].verify_steps == got.verify_steps
        assert counts[prompt.id].accepted_per_position == got.accepted_per_position
    summary = exact.summary()
    assert summary["exactness"] == {"prompts": 6, "equal": 6, "near_ties": []}


def test_timed_decoding_adds_up(subject: Subject, states: StatesDataset) -> None:
    settings = EvaluateSettings(decode_prompts=2, decode_tokens=8)
    timing = timed_decoding(subject, spread_prompts(states, 2), settings, seed=0)
    assert timing["dtype"] == "bfloat16" and timing["prompts"] == 2
    assert len(timing["verify_costs"]) == settings.k
    assert timing["break_even_tau"] == pytest.approx(timing["r"] + 3 * timing["c"])
    assert timing["predicted_speedup"] == pytest.approx(timing["tau"] / timing["break_even_tau"])
    warm = settings.model_copy(update={"temperature": 0.7, "draft": "sampled"})
    assert timed_decoding(subject, spread_prompts(states, 2), warm, seed=0)["speedup"] > 0


def test_measured_by_hand() -> None:
    plain = Decoded(token_ids=[0] * 11, verify_steps=10, prefill_seconds=1, verify_seconds=10)
    speculative = Decoded(
        token_ids=[0] * 11,
        verify_steps=5,
        drafted=10,
        accepted=5,
        prefill_seconds=1.5,
        verify_seconds=6,
        draft_seconds=1,
    )
    got = measure(Run([plain], [speculative]), k=2)
    assert got["plain_tokens_per_s"] == 1.0
    assert got["speculative_tokens_per_s"] == pytest.approx(11 / 8.5)
    assert got["speedup"] == pytest.approx(11 / 8.5)
    assert (got["r"], got["c"], got["tau"]) == pytest.approx((1.2, 0.1, 2.0))
    assert got["break_even_tau"] == pytest.approx(1.4)
    assert got["predicted_speedup"] == pytest.approx(2 / 1.4)
    assert got["speedup_decoding"] == pytest.approx(10 / 7)


def test_summary_covers_and_groups(subject: Subject, states: StatesDataset) -> None:
    drafter = subject.drafter(torch.float32)
    summary = acceptance_summary(replay(drafter, states, 3, dtype=torch.float32), states, drafter)
    assert list(summary) == ["human_eval", "mt_bench", "all"]
    answers = [d.token_ids[d.loss_mask.bool()] for d in states]
    even = sum(int((ids % 2 == 0).sum()) for ids in answers)
    assert summary["all"]["vocabulary_coverage"] == pytest.approx(even / (6 * TOKENS))
    assert summary["mt_bench"]["prompts"] == 2
    assert summary["all"]["tokens"] == 6 * TOKENS


def test_prompts_are_spread(states: StatesDataset) -> None:
    chosen = spread_prompts(states, 4)
    sources = dict(zip(states.ids, states.sources, strict=True))
    assert sorted(sources[item.id] for item in chosen) == ["human_eval"] * 2 + ["mt_bench"] * 2
    assert prompt_of(states[0]) == list(range(10, 20))
    with pytest.raises(HarnessError, match="fewer test prompts"):
        spread_prompts(states, 7)


def test_states_are_checked(subject: Subject, states: StatesDataset) -> None:
    check_states(states, subject, TAIL)
    with pytest.raises(HarnessError, match="cannot be replayed exactly"):
        check_states(states, subject, TAIL + 1)


def test_a_difference_must_be_a_near_tie() -> None:
    asked = []

    def logits_after(ids: object) -> torch.Tensor:
        asked.append(ids)
        return torch.tensor([0.0, 5.0, 5.0 - 1e-4, 4.0], dtype=torch.float64)

    def parted(plain: list[int], speculative: list[int]) -> Parting:
        found = parting("a", [9], plain, speculative, logits_after)
        assert found is not None
        return found

    assert parting("a", [9], [1, 3], [1, 3], logits_after) is None
    tie = parted([3, 1, 0], [3, 2, 2])
    check_near_tie(tie)
    assert (tie.position, tie.plain, tie.speculative) == (1, 1, 2)
    assert tie.gap == pytest.approx(1e-4)
    assert asked == [[9, 3]]
    with pytest.raises(HarnessError, match="another text"):
        check_near_tie(parted([1], [3]))
    with pytest.raises(HarnessError, match="stop at different places"):
        check_near_tie(parted([1], [1, 2]))


def test_summarise_by_hand(tmp_path: Path) -> None:
    counts = [
        PromptCounts(
            id="a", benchmark="x", verify_steps=10, drafted=30, accepted=9,
            accepted_per_position=[5, 3, 1], tokens=20,
        ),
        PromptCounts(
            id="b", benchmark="y", verify_steps=30, drafted=90, accepted=11,
            accepted_per_position=[5, 5, 1], tokens=42,
        ),
    ]  # fmt: skip
    groups = by_benchmark(counts)
    assert list(groups) == ["x", "y", "all"]
    got = summarise(groups["all"])
    assert got["tau"] == 1.5
    assert got["acceptance_rate"] == pytest.approx(20 / 120)
    assert got["per_position_unconditional"] == [0.25, 0.2, 0.05]
    assert got["per_position_conditional"] == [0.25, 0.8, 0.25]
    write_counts(tmp_path / "x.jsonl", counts)
    assert read_counts(tmp_path / "x.jsonl") == counts
    (tmp_path / "x.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(HarnessError, match=r"x\.jsonl:1"):
        read_counts(tmp_path / "x.jsonl")


def test_distinct_share() -> None:
    assert distinct_share([[1, 1, 1, 1, 1, 1]]) == 0.25
    assert distinct_share([[1, 2, 3, 4], [1, 2, 3]]) == 1.0
    assert distinct_share([[1, 2]]) == 1.0
