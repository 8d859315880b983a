"""Speculative decoding: output exactly that of plain decoding, counts exactly those of replay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.cached_verifier import CachedVerifier
from eagle3.chain import ChainProposer
from eagle3.dataset import Document
from eagle3.decode import (
    Decoded,
    Drafts,
    Verifier,
    plain_decode,
    speculative_decode,
    verify_sampled,
)
from eagle3.drafter import DraftCache, Drafter
from eagle3.lean_verifier import LeanVerifier
from eagle3.packed_linear import pack_linears
from eagle3.replay import replay
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model
from tests.tiny import tiny_drafter_config

AUX = (0, 2, 3)
PROMPTS = [[1, 40, 77, 300, 12, 9], [5, 6, 7], list(range(20, 60))]


@pytest.fixture(scope="module")
def model(tiny_verifier_untied: Path) -> Any:
    return load_model(VerifierSpec.open(tiny_verifier_untied), torch.float32, "cpu")


@pytest.fixture(params=["transformers", "lean", "packed"])
def verifier(tiny_verifier_untied: Path, request: pytest.FixtureRequest) -> Verifier:
    loaded = load_model(VerifierSpec.open(tiny_verifier_untied), torch.float32, "cpu")
    if request.param == "transformers":
        return CachedVerifier(loaded, AUX, capacity=4)
    return LeanVerifier(loaded, AUX, pack=request.param == "packed")


def random_drafter(vocab_size: int, *, seed: int, full_vocabulary: bool = False) -> Drafter:
    drafts = vocab_size if full_vocabulary else vocab_size // 2
    config = tiny_drafter_config(vocab_size, drafts, intermediate_size=96)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = Drafter(config, torch.randn(vocab_size, 64)).eval()
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3)
    if not full_vocabulary:
        drafter.d2t += torch.arange(drafts)  # every second token
    return drafter.requires_grad_(False)


class Scripted:
    """Proposes what a list says comes next, each token changed by `offset`: its answers are known.

    Args:
        script: the verifier's own continuation of the prompt.
    """

    def __init__(self, script: list[int], vocab_size: int, offset: int = 0) -> None:
        self.script, self.vocab_size, self.offset = script, vocab_size, offset

    def reset(self) -> None:
        self.seen = 0

    def observe(self, next_ids_N: Tensor, aux_NLH: Tensor) -> None:
        assert len(next_ids_N) == len(aux_NLH)
        # Of the prompt's rows only the last one's next token is new.
        self.seen += len(next_ids_N) if self.seen else 1

    def propose(self, k: int) -> Drafts:
        tokens = torch.tensor(self.script[self.seen : self.seen + k])
        return Drafts((tokens + self.offset) % self.vocab_size)


def generate(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """transformers' own greedy decoding, through its stock attention and cache."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def vocabulary(verifier: Verifier) -> int:
    verifier.reset()
    return verifier.forward(torch.tensor([1]), 1).logits_MV.shape[1]


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """What transformers says to each prompt."""
    return [generate(model, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_equals_transformers(
    expected: list[list[int]], verifier: Verifier, number: int
) -> None:
    prompt, text = PROMPTS[number], expected[number]
    assert plain_decode(verifier, prompt, max_tokens=40).token_ids == text
    vocab_size = vocabulary(verifier)
    for seed, k in enumerate((1, 3, 5)):
        drafter = random_drafter(vocab_size, seed=seed)
        got = speculative_decode(verifier, ChainProposer(drafter), prompt, k=k, max_tokens=40)
        assert got.token_ids == text
        assert got.drafted == k * got.verify_steps


def test_aux_states_are_the_layers_outputs(model: Any, verifier: Verifier) -> None:
    prompt = torch.tensor(PROMPTS[0])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = model(prompt[None], output_hidden_states=True).hidden_states
    verifier.reset()
    first = verifier.forward(prompt[:2], 1).aux_NLH
    rest = verifier.forward(prompt[2:], 1).aux_NLH
    expected = torch.stack([states[layer + 1][0] for layer in AUX], dim=1)
    torch.testing.assert_close(torch.cat([first, rest]), expected, rtol=1e-4, atol=1e-4)


def test_crop_forgets(verifier: Verifier) -> None:
    verifier.reset()
    verifier.forward(torch.tensor([3, 4, 5]), 1)
    expected = verifier.forward(torch.tensor([6, 7]), 2).logits_MV
    verifier.crop(3)
    verifier.forward(torch.tensor([8, 9, 10]), 1)
    verifier.crop(3)
    assert verifier.length == 3
    torch.testing.assert_close(verifier.forward(torch.tensor([6, 7]), 2).logits_MV, expected)


def test_always_and_never_accepted(verifier: Verifier) -> None:
    vocab_size, prompt, k = vocabulary(verifier), PROMPTS[0], 3
    script = plain_decode(verifier, prompt, max_tokens=60).token_ids
    for offset, tau in ((0, k + 1), (1, 1)):
        got = speculative_decode(
            verifier, Scripted(script, vocab_size, offset), prompt, k=k, max_tokens=41
        )
        assert got.token_ids == script[:41]
        assert 1 + got.accepted / got.verify_steps == tau
        assert got.verify_steps == 40 // tau
        assert got.accepted_per_position == [got.verify_steps * (tau - 1) // k] * k


def test_drafts_behind_the_end_are_counted_and_cut(verifier: Verifier) -> None:
    vocab_size, prompt = vocabulary(verifier), PROMPTS[1]
    script = plain_decode(verifier, prompt, max_tokens=60).token_ids
    end = next(i for i in range(5, 60) if script[i] not in script[:i])
    cut = speculative_decode(
        verifier, Scripted(script, vocab_size), prompt, k=3, max_tokens=50, eos_ids={script[end]}
    )
    assert cut.token_ids == script[: end + 1]
    assert cut.accepted == 3 * cut.verify_steps
    short = speculative_decode(verifier, Scripted(script, vocab_size), prompt, k=3, max_tokens=6)
    assert (short.token_ids, short.verify_steps, short.accepted) == (script[:6], 2, 6)
    plain = plain_decode(verifier, prompt, max_tokens=50, eos_ids={script[end]})
    assert plain.token_ids == script[: end + 1]


def test_counts_equal_replay(verifier: Verifier) -> None:
    """On the same greedy answers, drafters that accept something: step by step the same counts."""
    vocab_size, k, tokens, tail = vocabulary(verifier), 3, 40, 8
    documents, decoded = [], []
    drafter = random_drafter(vocab_size, seed=7, full_vocabulary=True)
    answers = [plain_decode(verifier, prompt, max_tokens=tokens + tail) for prompt in PROMPTS]
    teach(drafter, verifier, answers)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        ids = torch.tensor(prompt + answer.token_ids)
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        mask[len(prompt) : len(prompt) + tokens] = 1
        verifier.reset()
        aux = verifier.forward(ids, 1).aux_NLH
        documents.append(
            Document(
                id=str(number),
                source="test",
                token_ids=ids.int(),
                loss_mask=mask,
                aux=aux,
                final=torch.zeros(len(ids), 64),
                verifier_top1=ids.int(),
                verifier_lse=torch.zeros(len(ids)),
            )
        )
        decoded.append(
            speculative_decode(verifier, ChainProposer(drafter), prompt, k=k, max_tokens=tokens)
        )
    counts = replay(drafter, documents, k, dtype=torch.float32)
    for count, got in zip(counts, decoded, strict=True):
        assert count.verify_steps == got.verify_steps
        assert count.accepted == got.accepted
        assert list(count.accepted_per_position) == got.accepted_per_position
    assert sum(count.accepted for count in counts) > 20


def teach(drafter: Drafter, verifier: Verifier, answers: list[Decoded]) -> None:
    """Fits the drafter's head to half of the answers by least squares: it is right at times."""
    rows, targets = [], []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor(prompt + answer.token_ids)
        verifier.reset()
        aux = verifier.forward(ids, 1).aux_NLH
        out = drafter.forward_cached(
            ids[1:], drafter.fuse(aux[:-1]), torch.arange(len(ids) - 1), DraftCache()
        )
        rows.append(out[len(prompt) : -1 : 2])
        targets.append(ids[len(prompt) + 2 :: 2])
    x = torch.cat(rows)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    y = torch.nn.functional.one_hot(torch.cat(targets), drafter.config.vocab_size).float()
    ridge = x.T @ x + 1e-3 * torch.eye(x.shape[1])
    drafter.lm_head.weight.copy_(torch.linalg.solve(ridge, x.T @ y).T)


@pytest.mark.parametrize("sampled", [False, True])
def test_rejection_keeps_the_distribution(sampled: bool) -> None:
    """Two drafts over five tokens: the first two emitted tokens are distributed as p · p."""
    rng = torch.Generator().manual_seed(3)
    vocab, trials = 5, 15_000
    first_p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    # Row i of p after a first token x; q is another chain.
    second_p = torch.rand(vocab, vocab, generator=rng).softmax(-1)
    second_p[0] = torch.tensor([0.0, 0.7, 0.1, 0.2, 0.0])
    first_q = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4])
    second_q = torch.rand(vocab, vocab, generator=rng).mul(4).softmax(-1)
    counts = torch.zeros(vocab, vocab)
    draws = torch.Generator().manual_seed(11)
    for _ in range(trials):
        if sampled:
            one = int(torch.multinomial(first_q, 1, generator=rng))
            two = int(torch.multinomial(second_q[one], 1, generator=rng))
            drafts = Drafts(torch.tensor([one, two]), torch.stack([first_q, second_q[one]]))
        else:
            one, two = 1, 1
            drafts = Drafts(torch.tensor([one, two]))
        probs = torch.stack([first_p, second_p[one], first_p])
        accepted, token = verify_sampled(probs, drafts, draws)
        emitted = [*[one, two][:accepted], token]
        if len(emitted) == 1:  # the next step's first token, by plain decoding
            emitted.append(int(torch.multinomial(second_p[emitted[0]], 1, generator=draws)))
        counts[emitted[0], emitted[1]] += 1
    expected = trials * first_p[:, None] * second_p
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    # Five standard deviations of chi-square above its mean: 3e-6 of runs would be above.
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_sampled_acceptance_rates_are_the_rules() -> None:
    """A draft x is accepted with probability sum over x of min(p, q)."""
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.2, 0.2, 0.6]])
    draws = torch.Generator().manual_seed(0)
    trials, hits = 20_000, 0
    for _ in range(trials):
        draft = torch.multinomial(q[0], 1, generator=draws)
        hits += verify_sampled(p, Drafts(draft, q), draws)[0]
    assert hits / trials == pytest.approx(0.6, abs=0.015)


@pytest.mark.parametrize("verifier", ["lean"], indirect=True)  # whose logits are the others' too
@pytest.mark.parametrize("choice", ["argmax", "sampled"])
def test_sampling_end_to_end(verifier: Verifier, choice: Any) -> None:
    """The second and third token after a prompt, over many runs, against exact probabilities."""
    vocab_size, prompt, runs = vocabulary(verifier), PROMPTS[1], 300
    drafter = random_drafter(vocab_size, seed=1)
    temperature = 0.25
    verifier.reset()
    logits = verifier.forward(torch.tensor(prompt), 1).logits_MV[0]
    first = int(logits.argmax())
    probs = plain_next(verifier, [*prompt, first], temperature)
    seen = torch.zeros(vocab_size)
    total = 0
    for run in range(runs):
        got = speculative_decode(
            verifier,
            ChainProposer(
                drafter,
                choice=choice,
                temperature=temperature,
                generator=torch.Generator().manual_seed(run),
            ),
            [*prompt],
            k=2,
            max_tokens=2,
            temperature=temperature,
            generator=torch.Generator().manual_seed(10_000 + run),
        )
        if got.token_ids[0] == first:
            seen[got.token_ids[1]] += 1
            total += 1
    assert total > 50
    top = probs.topk(3).indices
    for token in top.tolist():
        share, expected = float(seen[token] / total), float(probs[token])
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / total) + 1e-3


def plain_next(verifier: Verifier, ids: list[int], temperature: float) -> Tensor:
    verifier.reset()
    logits = verifier.forward(torch.tensor(ids), 1).logits_MV[0]
    return (logits / temperature).softmax(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_packed_linears_compute_the_same(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 32, bias=False)
    ).to(dtype)
    x = torch.randn(4, 64, dtype=dtype)
    with torch.inference_mode():
        expected = plain(x)
        packed = pack_linears(plain)
        assert packed in (0, 2)  # 0 on processors without the units
        torch.testing.assert_close(plain(x), expected, rtol=tolerance, atol=tolerance)
    assert pack_linears(torch.nn.Sequential(torch.nn.Linear(4, 4).double())) == 0
