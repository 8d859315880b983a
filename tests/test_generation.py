"""Batched generation, sampling and regeneration: values against transformers and by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import HarnessError
from eagle3.generation import Request, check_fit, generate
from eagle3.generation_workers import Generation
from eagle3.prompts import Prompt, from_user
from eagle3.regenerate import RegenerateSettings, regenerate, waves
from eagle3.sampling import Sampling, choose
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model, load_tokenizer

GREEDY = Sampling(temperature=0.0)


def _requests(lengths: list[int], limit: int, vocab_size: int = 256) -> list[Request]:
    numbers = torch.Generator().manual_seed(5)
    return [
        Request(
            str(i), tuple(torch.randint(3, vocab_size, (n,), generator=numbers).tolist()), limit
        )
        for i, n in enumerate(lengths)
    ]


def _with_transformers(model: Any, request: Request, tokens: int) -> list[int]:
    """Greedy continuation that does not stop at the end of a sequence."""
    out = model.generate(
        torch.tensor([request.prompt]),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(request.prompt) :].tolist()


@pytest.fixture(scope="module")
def loaded(tiny_verifier: Path) -> tuple[VerifierSpec, Any]:
    spec = VerifierSpec.open(tiny_verifier)
    return spec, load_model(spec, torch.float32, "cpu")


def test_greedy_equals_transformers_in_a_ragged_batch_that_refills(
    loaded: tuple[VerifierSpec, Any],
) -> None:
    spec, model = loaded
    requests = _requests([5, 40, 17, 1, 23, 9, 60, 12, 33, 2], limit=12)
    requests = [Request(r.id, r.prompt, 4 + i, tail=i % 4) for i, r in enumerate(requests)]
    done = {c.id: c for c in generate(model, spec, requests, GREEDY, seed=0, slots=4)}
    assert set(done) == {request.id for request in requests}
    for request in requests:
        expected = _with_transformers(model, request, request.limit + request.tail)
        stops = [i for i, token in enumerate(expected[: request.limit]) if token == 2]
        length = stops[0] + 1 if stops else request.limit
        assert done[request.id].response == expected[:length]
        assert done[request.id].tail == expected[length : length + request.tail]
        assert done[request.id].finish_reason == ("stop" if stops else "length")


def test_end_of_sequence_ends_a_response_and_the_tail_goes_on(
    loaded: tuple[VerifierSpec, Any],
) -> None:
    spec, model = loaded
    (request,) = _requests([11], limit=9)
    expected = _with_transformers(model, request, 12)
    ending = spec.model_copy(update={"eos_token_ids": [expected[4]]})
    first = expected.index(expected[4])
    request = replace(request, tail=2)
    (done,) = generate(model, ending, [request], GREEDY, seed=0, slots=3)
    assert done.response == expected[: first + 1]
    assert done.tail == expected[first + 1 : first + 3]
    assert done.finish_reason == "stop"


def test_a_common_prefix_changes_nothing(loaded: tuple[VerifierSpec, Any]) -> None:
    spec, model = loaded
    shared = tuple(range(30, 60))
    requests = [Request(str(i), shared + r.prompt, 8) for i, r in enumerate(_requests([3, 9], 8))]
    endless = spec.model_copy(update={"eos_token_ids": []})
    done = {c.id: c.response for c in generate(model, endless, requests, GREEDY, seed=0, slots=2)}
    assert done == {r.id: _with_transformers(model, r, 8) for r in requests}


def test_sliding_window_layers_equal_transformers(
    loaded: tuple[VerifierSpec, Any],
) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    spec, _ = loaded
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Gemma3ForCausalLM(config).eval()
    requests = _requests([4, 19, 11], limit=10, vocab_size=64)
    endless = spec.model_copy(update={"eos_token_ids": []})
    done = {c.id: c.response for c in generate(model, endless, requests, GREEDY, seed=0, slots=2)}
    assert done == {r.id: _with_transformers(model, r, 10) for r in requests}


def test_draws_depend_on_seed_and_id_only(loaded: tuple[VerifierSpec, Any]) -> None:
    spec, model = loaded
    requests = _requests([8, 8, 8, 8], limit=16)
    sampling = Sampling(temperature=1.0)

    def answers(some: list[Request], seed: int, slots: int) -> dict[str, list[int]]:
        return {
            c.id: c.response for c in generate(model, spec, some, sampling, seed=seed, slots=slots)
        }

    together = answers(requests, 1, 4)
    assert together == answers(requests, 1, 4)
    assert answers(requests[2:3], 1, 1)["2"] == together["2"]
    assert answers(requests, 2, 4) != together


def test_a_request_that_does_not_fit_is_an_error_before_any_work(
    loaded: tuple[VerifierSpec, Any],
) -> None:
    spec, _ = loaded
    with pytest.raises(HarnessError, match="context") as caught:
        check_fit(spec, [Request("long one", tuple([3] * 2040), 10)])
    assert "long one" in str(caught.value) and "2048" in str(caught.value)
    check_fit(spec, [Request("fits", tuple([3] * 2038), 10)])


def test_waves_are_fixed_and_complete() -> None:
    requests = _requests([9, 2, 5, 2, 7], limit=1)
    made = waves(requests, 2)
    assert [[len(r.prompt) for r in wave] for wave in made] == [[2], [2, 5], [7, 9]]
    assert made == waves(list(reversed(requests)), 2)


# --- sampling -----------------------------------------------------------------------------------


def _shares(logits: list[float], sampling: Sampling) -> torch.Tensor:
    """Chosen shares over evenly spaced uniforms: the distribution itself, up to 1/count."""
    count = 10_000
    uniforms = (torch.arange(count) + 0.5) / count
    chosen = choose(torch.tensor([logits]).expand(count, -1), uniforms, sampling)
    return torch.bincount(chosen, minlength=len(logits)) / count


def test_sampling_follows_the_softmax() -> None:
    logits = [0.5, -1.0, 2.0, 0.0, -30.0]
    for temperature in (0.7, 1.0, 2.0):
        expected = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1)
        shares = _shares(logits, Sampling(temperature=temperature))
        assert (shares - expected).abs().max() < 2e-4


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().tolist()
    top_k = _shares(logits, Sampling(temperature=1.0, top_k=2))
    assert torch.allclose(top_k, torch.tensor([4 / 7, 0, 3 / 7, 0]), atol=2e-4)
    # 0.4 alone falls short of 0.6, 0.4 + 0.3 does not.
    top_p = _shares(logits, Sampling(temperature=1.0, top_p=0.6))
    assert torch.allclose(top_p, torch.tensor([4 / 7, 0, 3 / 7, 0]), atol=2e-4)
    both = _shares(logits, Sampling(temperature=1.0, top_k=3, top_p=0.5))
    assert torch.allclose(both, torch.tensor([4 / 7, 0, 3 / 7, 0]), atol=2e-4)


def test_the_ends_of_the_uniform_range_choose_tokens_with_mass() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1.0 - 2**-24])
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3)):
        assert set(choose(logits, uniforms, sampling).tolist()) == {0, 2}


@pytest.mark.parametrize("vocabulary", [7, 64 * 5, 512 * 3, 1000])
def test_greedy_takes_the_lowest_id_among_equals(vocabulary: int) -> None:
    numbers = torch.Generator().manual_seed(1)
    # Few distinct values: many equals, in one part of the vocabulary and across parts.
    logits = torch.randint(0, 4, (50, vocabulary), generator=numbers).to(torch.bfloat16)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert choose(logits, torch.zeros(50), GREEDY).tolist() == expected


# --- regenerate ---------------------------------------------------------------------------------


def _settings(**changes: Any) -> RegenerateSettings:
    values: dict[str, Any] = {
        "splits": ["train", "dev"],
        "sampling": Sampling(temperature=0.9),
        "max_new_tokens": 10,
        "tail": 2,
        "dtype": "float32",
        "slots": 3,
        "wave": 4,
    }
    return RegenerateSettings(**(values | changes))


def _prompts() -> dict[str, list[Prompt]]:
    return {
        "train": [from_user("count " * n + "stones", "x") for n in range(1, 10)],
        "dev": [from_user(f"What is {n}?", "x") for n in range(3)],
    }


def _run(spec: VerifierSpec, work: Path, out: Path, **changes: Any) -> dict[str, Any]:
    work.mkdir(exist_ok=True)
    settings = _settings(**changes)
    return regenerate(spec, _prompts(), settings, seed=4, device="cpu", work=work, out=out)


def test_responses_say_what_is_supervised(tiny_verifier: Path, tmp_path: Path) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    facts = _run(spec, tmp_path / "work", tmp_path / "out")
    tokenizer, model = load_tokenizer(spec), load_model(spec, torch.float32, "cpu")
    lines = [json.loads(line) for line in (tmp_path / "out" / "dev.jsonl").read_text().splitlines()]
    prompts = {prompt.id: prompt for prompt in _prompts()["dev"]}
    assert [line["id"] for line in lines] == sorted(prompts)
    for line in lines:
        ids = tokenizer.apply_chat_template(
            prompts[line["id"]].as_messages(), add_generation_prompt=True, return_dict=False
        )
        ((start, end),) = line["loss_mask"]
        assert line["token_ids"][:start] == ids
        assert len(line["token_ids"]) == end + 2
        greedy = _with_transformers(model, Request("", tuple(ids), 1), end - start + 2)
        assert line["token_ids"][start:] == greedy
        assert line["sampling"]["temperature"] == 0.0 and line["sampling"]["tail"] == 2
    train = [json.loads(s) for s in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert all(line["loss_mask"][0][1] == len(line["token_ids"]) for line in train)
    assert all(line["sampling"]["temperature"] == 0.9 for line in train)
    assert facts["train"]["responses"] == 9
    assert facts["train"]["supervised_tokens"] == sum(
        line["loss_mask"][0][1] - line["loss_mask"][0][0] for line in train
    )


def test_a_killed_run_is_taken_up_and_comes_to_the_same_bytes(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    _run(spec, tmp_path / "whole", tmp_path / "expected")
    calls: list[int] = []
    whole = Generation.__call__

    def failing(self: Generation, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Generation, "__call__", failing)
    with pytest.raises(KeyboardInterrupt):
        _run(spec, tmp_path / "killed", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert calls == [3, 3, 3]
    _run(spec, tmp_path / "killed", tmp_path / "out")
    assert calls == [3, 3, 3, 3, 3]  # finished waves were not redone
    for split in ("train", "dev"):
        name = f"{split}.jsonl"
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_a_prompt_longer_than_the_context_stops_before_the_model_loads(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "start", lambda _: pytest.fail("model loaded"))
    spec = VerifierSpec.open(tiny_verifier)
    prompts = {"train": [from_user("fox river " * 3000, "x")]}
    with pytest.raises(HarnessError, match="context"):
        regenerate(
            spec, prompts, _settings(splits=["train"]), seed=0, device="cpu", work=tmp_path,
            out=tmp_path / "out",
        )  # fmt: skip
    with pytest.raises(HarnessError, match="no dev prompts"):
        regenerate(
            spec, prompts, _settings(splits=["dev"]), seed=0, device="cpu", work=tmp_path,
            out=tmp_path / "out",
        )  # fmt: skip


@pytest.mark.parametrize("template", ["Hello.", "", "{{ messages[0]['content'] | upper }}"])
def test_a_template_that_loses_what_is_asked_is_refused(
    tiny_verifier: Path, tmp_path: Path, template: str
) -> None:
    """Answers to something else would look like any others."""
    folder = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, folder)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(HarnessError, match=r"changes a user's text|no chat template"):
        _run(VerifierSpec.open(folder), tmp_path / "work", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_given_answers_are_kept_when_asked(tiny_verifier: Path, tmp_path: Path) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    conversation = Prompt((("user", "How many?"), ("assistant", "One by one.")), "file")
    settings = _settings(splits=["train"], keep_given=True)
    regenerate(
        spec, {"train": [conversation]}, settings, seed=0, device="cpu", work=tmp_path,
        out=tmp_path / "out",
    )  # fmt: skip
    (line,) = [json.loads(s) for s in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(spec)
    ((start, end),) = line["loss_mask"]
    assert tokenizer.decode(line["token_ids"][start:end]) == "One by one.<|im_end|>"
