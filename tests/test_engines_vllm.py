"""vLLM itself, on this machine: its states are transformers', its counts are the local engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.checkpoint import DrafterFormat, save_drafter
from eagle3.decode import Decoded
from eagle3.engines.served import Answer
from eagle3.engines.server import ServerSettings
from eagle3.engines.vllm import Counters, launch, parse_counters
from eagle3.engines.vllm_decoding import VllmServing
from eagle3.errors import HarnessError
from eagle3.extraction.vllm import captured_ids, vllm_engine
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model
from tests.engine_checks import (
    PROMPTS,
    decode_locally,
    head_of,
    installed,
    serve_a_random_drafter,
)
from tests.one_hot import chain, make_drafter, write_verifier
from tests.states_checks import relative_error
from tests.tiny import make_tiny_tokenizer, make_tiny_verifier

VLLM = installed("vllm")
SERVED = (0, 2, 3)
ASKED = [3, 0, 4]  # the last layer among them, and not in ascending order
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="v"} 24.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="v"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="v"} 72.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="v"} 23.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="1"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="v",position="1"} 4.0
vllm:generation_tokens_total{engine="0",model_name="v"} 48.0
vllm:generation_tokens_total{engine="1",model_name="v"} 2.0
"""


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> VerifierSpec:
    # vLLM's attention on CPUs wants heads of 32 or more.
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_verifier(folder, tied=False, hidden_size=256, dtype="float32")
    return VerifierSpec.open(folder)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> VerifierSpec:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=make_tiny_tokenizer(folder), hidden_size=96, intermediate_size=128,
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.15,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return VerifierSpec.open(folder)


def test_counters_are_sums_and_differences() -> None:
    now = parse_counters(METRICS)
    assert now == Counters(50, 24, 72, 23, (12, 11))
    assert now.since(Counters(10, 4, 12, 3, (2, 1))) == Counters(40, 20, 60, 20, (10, 10))
    assert now.since(Counters(0, 0, 0, 0, ())) == now  # positions appear with the first drafts


def test_layer_ids_are_inputs_and_the_last_is_the_final_state() -> None:
    assert captured_ids([26, 1, 14], 30) == [2, 15, 27, 30]
    assert captured_ids([2, 30, 60], 61) == [3, 31, 61]  # the last layer's output is the final


def test_without_vllm_the_way_to_it_is_named(tiny_verifier: Path, tmp_path: Path) -> None:
    settings = ServerSettings(environment=str(tmp_path))
    with pytest.raises(HarnessError, match="not installed") as caught:
        launch(settings, VerifierSpec.open(tiny_verifier), dtype="float32", log=tmp_path / "log")
    assert "make engines" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wide_llama", "qwen3"])
def test_states_are_those_of_transformers(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    spec: VerifierSpec = request.getfixturevalue(kind)
    draw = torch.Generator().manual_seed(1)
    documents = [
        torch.randint(3, spec.vocab_size, (length,), generator=draw, dtype=torch.int32)
        for length in (70, 1, 33, 33, 5)
    ]
    # A batch of 24 tokens cuts most documents: chunked prefill must lose no row.
    with vllm_engine(
        VLLM, spec, ASKED, dtype="float32", device="cpu", batch_tokens=24, longest=70,
        work=tmp_path,
    ) as engine:  # fmt: skip
        assert engine.identity.final_hidden == "pre_norm"
        found = engine.extract(documents)
        again = engine.extract(documents[:1])[0]
    assert [path.name for path in (tmp_path / "vllm-states").iterdir()] == []
    model: Any = load_model(spec, torch.float32, "cpu")
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _, given, out: before_norm.append(given[0][0]))
    for tokens, states in zip(documents, found, strict=True):
        before_norm.clear()
        with torch.no_grad():
            alone = model(tokens[None].long(), output_hidden_states=True)
        final = before_norm[0]
        expected = torch.stack([alone.hidden_states[4][0], alone.hidden_states[1][0], final], dim=1)
        assert states.aux_TnH.shape == (len(tokens), 3, spec.hidden_size)
        for column in range(3):
            assert relative_error(states.aux_TnH[:, column], expected[:, column]) < 1e-4
        assert relative_error(states.final_TH, final) < 1e-4
        assert torch.equal(states.top1_T, alone.logits[0].argmax(-1).int())
        lse = alone.logits[0].logsumexp(-1)
        torch.testing.assert_close(states.lse_T, lse, rtol=1e-4, atol=1e-3)
    assert relative_error(again.final_TH, found[0].final_TH) < 1e-4


def serving(spec: VerifierSpec, logs: Path) -> VllmServing:
    return VllmServing(
        settings=VLLM, spec=spec, dtype="float32", device="cpu", k=3, max_length=128, logs=logs
    )


def count_alike(served: Answer, local: Decoded) -> None:
    assert served.token_ids == local.token_ids
    assert served.accepted_per_step == local.accepted_per_step
    assert (served.verify_steps, served.drafted) == (local.verify_steps, local.drafted)
    assert served.accepted == local.accepted
    assert served.accepted_per_position == local.accepted_per_position


@pytest.mark.slow
def test_a_random_drafter_changes_nothing(wide_llama: VerifierSpec, tmp_path: Path) -> None:
    for served, local in serve_a_random_drafter("vllm", "0.32.0", wide_llama, SERVED, tmp_path):
        count_alike(served, local)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_a_drafter_whose_every_draft_is_known(layout: DrafterFormat, tmp_path: Path) -> None:
    """Every layout once, one of them without a token that comes up: drafts end before it."""
    spec = VerifierSpec.open(write_verifier(tmp_path / "verifier"))
    head = head_of(spec, tmp_path)
    missing = (11,) if layout == "eagle" else ()
    drafter = make_drafter([token for token in range(8, 28) if token not in missing])
    save_drafter(tmp_path / "drafter", drafter, head.config, torch.float32, layout)
    with serving(spec, tmp_path).serve(tmp_path / "drafter") as decoder:
        served = [decoder.decode(prompt, 41) for prompt in PROMPTS]
    local = decode_locally(spec, head, tmp_path / "drafter", 41)
    for prompt, answer, expected in zip(PROMPTS, served, local, strict=True):
        assert answer.token_ids == chain(prompt[-1], 41)
        count_alike(answer, expected)
        if missing:
            assert 0 < answer.accepted < answer.drafted
        else:
            assert answer.accepted_per_step == [3] * 10
            assert answer.accepted_per_position == [10, 10, 10]
