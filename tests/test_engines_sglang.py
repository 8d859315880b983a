"""SGLang itself, on this machine: its states are transformers', its counts the local engine's."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.chain import ChainProposer
from eagle3.checkpoint import load_drafter, save_drafter
from eagle3.dataset import StatesDataset, StatesMeta
from eagle3.decode import Decoded, speculative_decode
from eagle3.decode_verifier import CachedVerifier
from eagle3.engines.server import ServerSettings, ask, running
from eagle3.engines.sglang import check_drafter, serving_launch, states_launch
from eagle3.engines.sglang_decoding import SGLangServing, counted
from eagle3.errors import HarnessError
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.extraction.base import ExtractSettings
from eagle3.extraction.run import extract
from eagle3.extraction.sglang import check_capture, sglang_engine
from eagle3.initialise import DrafterSettings, new_drafter
from eagle3.layer_ids import from_sglang
from eagle3.real_decoding import Prompt, exact_logits
from eagle3.responses import Response
from eagle3.served_decoding import (
    decode_served,
    served_counts,
    served_speed,
    serving_engine,
)
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from eagle3.verifier_model import load_model
from eagle3.vocab import DraftVocabulary
from tests.one_hot import AUX, chain, make_drafter, write_verifier
from tests.test_engine_server import TELLS, launch
from tests.tiny import make_tiny_tokenizer, make_tiny_verifier

PROMPTS = [[1, 40, 77, 200, 12, 9], [5, 6, 7], list(range(20, 60))]
LENGTHS = (70, 1, 33, 33, 5, 120, 18, 64)


@pytest.fixture(scope="module")
def settings(project_root: Path) -> ServerSettings:
    return ServerSettings(environment=str(project_root / ".venv-sglang"), start_seconds=600)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> VerifierSpec:
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_verifier(folder, tied=False, num_hidden_layers=6, dtype="float32")
    return VerifierSpec.open(folder)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> VerifierSpec:
    """Kimi-K2.5's text model in small: latent attention, a dense layer, then experts with a shared
    one, routed by sigmoid scores with a correction bias."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("deepseek")
    config = DeepseekV3Config(
        vocab_size=make_tiny_tokenizer(folder), hidden_size=64, intermediate_size=128,
        moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, routed_scaling_factor=2.5,
        kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32,
        n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        norm_topk_prob=True, max_position_embeddings=512, rms_norm_eps=1e-5,
        tie_word_embeddings=False, initializer_range=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = DeepseekV3ForCausalLM(config).float()
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    # transformers leaves out what it knows one way for; SGLang asks, and published ones say it.
    told = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    return VerifierSpec.open(folder)


def documents(vocab_size: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (n,), generator=draw, dtype=torch.int32) for n in LENGTHS]


def responses(spec: VerifierSpec) -> list[Response]:
    return [
        Response(id=f"r{i}", source="s", token_ids=ids.tolist(), loss_mask=[(0, len(ids))])
        for i, ids in enumerate(documents(spec.vocab_size))
    ]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def compare(spec: VerifierSpec, dataset: StatesDataset, dtype: str) -> dict[int | str, float]:
    """Largest relative error of every layer over all documents, against transformers."""
    model: Any = load_model(spec, getattr(torch, dtype), "cpu")
    worst: dict[int | str, float] = {}
    for one in dataset:
        with torch.no_grad():
            alone = model(one.token_ids[None].long(), output_hidden_states=True)
        states = {k: alone.hidden_states[k + 1][0] for k in dataset.meta.aux_layers}
        found: dict[int | str, torch.Tensor] = {
            k: one.aux[:, column] for column, k in enumerate(dataset.meta.aux_layers)
        }
        pairs = {k: (found[k], states[k]) for k in states} | {
            "final": (one.final, alone.hidden_states[-1][0]),
            "lse": (one.verifier_lse, alone.logits[0].float().logsumexp(-1)),
        }
        for name, (ours, theirs) in pairs.items():
            error = relative_error(ours.float(), theirs.float())
            worst[name] = max(worst.get(name, 0.0), error)
        if dtype == "float32":
            assert torch.equal(one.verifier_top1, alone.logits[0].argmax(-1).int())
    return worst


def meta_of(spec: VerifierSpec, layers: list[int], dtype: str) -> StatesMeta:
    return StatesMeta(
        verifier=spec.verifier, config_hash=spec.config_hash, engine="sglang",
        engine_version="0.5.23", aux_layers=layers, final_hidden="post_norm", dtype=dtype,
        hidden_size=spec.hidden_size, vocab_size=spec.vocab_size,
    )  # fmt: skip


@pytest.mark.slow
def test_states_are_those_of_transformers(
    llama: VerifierSpec, settings: ServerSettings, tmp_path: Path
) -> None:
    """On every layer that SGLang captures, in an order of our own. The server is killed on the way:
    nothing is lost or doubled."""
    spec = llama
    layers = [3, 0, *range(1, 3), *range(4, spec.num_hidden_layers - 1)]
    extraction = ExtractSettings(backend="sglang", dtype="float32", batch_tokens=64, shard_bytes=1)
    with sglang_engine(
        settings, spec, layers, dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        server = engine.servers[0]
        check_capture(server, spec, layers)
        with pytest.raises(HarnessError, match="captures other layers"):
            check_capture(server, spec, layers[1:])
        # The scheduler dies in the middle of the run.
        first = extract(
            engine, responses(spec)[:4], tmp_path / "states", meta=meta_of(spec, layers, "float32"),
            settings=extraction, ahead=2,
        )  # fmt: skip
        assert first.tokens == sum(LENGTHS[:4])
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        whole = extract(
            engine, responses(spec), tmp_path / "all", meta=meta_of(spec, layers, "float32"),
            settings=extraction, ahead=3,
        )  # fmt: skip
    assert whole.tokens == sum(LENGTHS)
    assert not list((tmp_path / "sglang-states").iterdir())
    dataset = StatesDataset.open(tmp_path / "all", verify=True)
    assert sorted(dataset.ids) == [f"r{i}" for i in range(len(LENGTHS))]
    errors = compare(spec, dataset, "float32")
    assert set(errors) == {*layers, "final", "lse"}
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.slow
def test_states_of_latent_attention_and_experts(
    deepseek: VerifierSpec, settings: ServerSettings, tmp_path: Path
) -> None:
    """SGLang's code for DeepSeek and Kimi, layers asked for by their raw ids, in an order of our
    own."""
    layers = [3, 0, 2]
    extraction = ExtractSettings(backend="sglang", dtype="float32", batch_tokens=64)
    with sglang_engine(
        settings, deepseek, layers, dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        check_capture(engine.servers[0], deepseek, layers)
        extract(
            engine, responses(deepseek), tmp_path / "states",
            meta=meta_of(deepseek, layers, "float32"), settings=extraction, ahead=2,
        )  # fmt: skip
    errors = compare(deepseek, StatesDataset.open(tmp_path / "states"), "float32")
    assert set(errors) == {*layers, "final", "lse"}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.slow
def test_attention_that_misreads_the_latent_cache_is_refused(
    deepseek: VerifierSpec, settings: ServerSettings, tmp_path: Path
) -> None:
    """As the server itself tells it, whoever chose it."""
    chosen = settings.model_copy(
        update={"arguments": ["--prefill-attention-backend", "torch_native"]}
    )
    refused = pytest.raises(HarnessError, match=r"latent cache[\s\S]*'prefill': 'torch_native'")
    with refused, sglang_engine(
        chosen, deepseek, [0, 2], dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ):  # fmt: skip
        pass


def test_attention_is_chosen_for_the_verifier_and_the_device(
    llama: VerifierSpec, deepseek: VerifierSpec, tmp_path: Path
) -> None:
    def chosen(spec: VerifierSpec, device: str, drafter: Path | None = None) -> list[str]:
        common: dict[str, Any] = {
            "dtype": "float32",
            "device": device,
            "longest": 9,
            "log": tmp_path / "log",
        }
        capture = states_launch(
            Path("python"), spec, [1], batch_tokens=9, folder=tmp_path, arguments=[], **common
        )
        serving = serving_launch(Path("python"), spec, drafter, k=3, arguments=[], **common)
        found = []
        for one in (capture, serving):
            words = list(map(str, one.command("127.0.0.1", 1)))
            found += [
                f"{word}={value}"
                for word, value in itertools.pairwise(words)
                if word.endswith("attention-backend")
            ]
        return found

    assert not llama.latent_attention and deepseek.latent_attention
    able = ["--prefill-attention-backend=intel_amx", "--decode-attention-backend=intel_amx"]
    assert chosen(llama, "cpu") == ["--attention-backend=torch_native", *able]
    for drafter in (None, tmp_path):
        assert chosen(deepseek, "cpu", drafter)[1:] == [*able, *able]
    assert chosen(deepseek, "cuda") == []


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({"attention_backend": "torch_native"}, True),
        ({"attention_backend": "torch_native", "prefill_attention_backend": "intel_amx"}, True),
        ({"attention_backend": "fa3", "decode_attention_backend": "torch_native"}, True),
        ({"attention_backend": "intel_amx"}, False),
        ({"attention_backend": "fa3", "prefill_attention_backend": None}, False),
    ],
)
def test_a_given_server_that_misreads_the_latent_cache_is_refused(
    told: dict[str, Any], refused: bool, llama: VerifierSpec, deepseek: VerifierSpec, tmp_path: Path
) -> None:
    """Before anything is asked of it: for states, and for texts."""
    info = {
        "version": "0.5.23", "disable_radix_cache": True, "chunked_prefill_size": -1,
        "enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": [3],
    }  # fmt: skip

    def extract_states(spec: VerifierSpec, url: str) -> None:
        given = ServerSettings(urls=[url], states=str(tmp_path))
        layers = from_sglang([3], spec.model_type)
        with sglang_engine(
            given, spec, layers, dtype="float32", device="cpu", batch_tokens=8, longest=8,
            work=tmp_path,
        ):  # fmt: skip
            pass

    def serve(spec: VerifierSpec, url: str) -> None:
        serving = SGLangServing(
            settings=ServerSettings(urls=[url]), spec=spec, dtype="float32", device="cpu", k=3,
            max_length=8, logs=tmp_path,
        )  # fmt: skip
        with serving.serve(None):
            pass

    code = TELLS.replace('{"version": "0.1.0"}', repr(info | told))
    with running(launch(tmp_path, code)) as server:
        for way in (extract_states, serve):
            way(llama, server.url)
            if refused:
                with pytest.raises(HarnessError, match="latent cache as keys and values"):
                    way(deepseek, server.url)
            else:
                way(deepseek, server.url)


@pytest.mark.slow
def test_states_in_bfloat16(llama: VerifierSpec, settings: ServerSettings, tmp_path: Path) -> None:
    layers = [0, 2, 4]
    extraction = ExtractSettings(backend="sglang", dtype="bfloat16", batch_tokens=64)
    with sglang_engine(
        settings, llama, layers, dtype="bfloat16", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        extract(
            engine, responses(llama), tmp_path / "states", meta=meta_of(llama, layers, "bfloat16"),
            settings=extraction,
        )  # fmt: skip
    errors = compare(llama, StatesDataset.open(tmp_path / "states"), "bfloat16")
    assert max(errors.values()) < 0.05, errors


@pytest.mark.slow
def test_a_server_that_would_leave_rows_out_is_refused(
    llama: VerifierSpec, settings: ServerSettings, tmp_path: Path
) -> None:
    """By the client before anything is asked, and by the plugin for a request that gets through."""
    chunked = settings.model_copy(update={"arguments": ["--chunked-prefill-size", "32"]})
    with sglang_engine(
        chunked, llama, [0, 2], dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        with pytest.raises(HarnessError, match=r"leave rows out[\s\S]*chunked_prefill_size 32"):
            check_capture(engine.servers[0], llama, [0, 2])
        (short,) = engine.extract([torch.arange(5, 25, dtype=torch.int32)])
        assert len(short.final_TH) == 20
        with pytest.raises(HarnessError, match=r"refuses[\s\S]*8 rows for 40 tokens"):
            engine.extract([torch.arange(5, 45, dtype=torch.int32)])
        body = {"input_ids": [5, 6], "rid": "../escape", "return_hidden_states": True}
        with pytest.raises(HarnessError, match="no file name"):
            ask(engine.servers[0].url, "/generate", body)


def head_of(spec: VerifierSpec, folder: Path) -> VerifierHead:
    write_head(spec, folder / "head.safetensors")
    return read_head(folder / "head.safetensors")


def decode_locally(
    spec: VerifierSpec, head: VerifierHead, drafter: Path, tokens: int
) -> list[Decoded]:
    loaded = load_drafter(drafter, head, torch.float32).eval().requires_grad_(False)
    verifier = CachedVerifier(load_model(spec, torch.float32, "cpu"), loaded.config.aux_layers)
    return [
        speculative_decode(
            verifier, ChainProposer(loaded), prompt, k=3, max_tokens=tokens,
            eos_ids=head.config.eos_token_ids,
        )
        for prompt in PROMPTS
    ]  # fmt: skip


@pytest.mark.slow
def test_a_random_drafter_changes_nothing(
    llama: VerifierSpec, settings: ServerSettings, tmp_path: Path
) -> None:
    """Through what evaluation calls: plain server, speculative server, the local engine."""
    head = head_of(llama, tmp_path)
    shape = DrafterSettings(layer_init="random", fc_init="random", head="random")
    half = DraftVocabulary.from_targets(torch.arange(1, llama.vocab_size, 2), llama.vocab_size)
    drafter = new_drafter(head, half, (0, 2, 4), shape, seed=0)
    save_drafter(tmp_path / "drafter", drafter, head.config, torch.float32)
    subject = Subject(llama, head, tmp_path / "drafter", "cpu")
    evaluation = EvaluateSettings(
        engine="sglang", engine_dtype="float32", decode_tokens=40, server=settings
    )
    prompts = [Prompt(f"p{number}", ids) for number, ids in enumerate(PROMPTS)]
    engine = serving_engine(subject, prompts, evaluation, tmp_path / "logs")
    assert engine is not None
    served = decode_served(engine, subject, prompts, evaluation)
    assert all(answer.verify_steps == answer.drafted == 0 for answer in served.plain)
    local = decode_locally(llama, head, tmp_path / "drafter", 40)
    counts = served_counts(served, prompts, local, 3, exact_logits(subject))
    assert (counts["engine"], counts["version"]) == ("sglang", "0.5.23")
    assert (counts["equal_to_plain"], counts["equal_to_local"]) == (3, 3)
    assert counts["accepted"] / counts["verify_steps"] < 0.1
    assert 0.25 <= counts["old_sglang_rate"] < 0.28
    assert served_speed(served)["speedup"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(), (11,)])
def test_a_drafter_whose_every_draft_is_known(
    missing: tuple[int, ...], settings: ServerSettings, tmp_path: Path
) -> None:
    """Always right; and without a token that comes up: drafts end before it."""
    spec = VerifierSpec.open(write_verifier(tmp_path / "verifier"))
    head = head_of(spec, tmp_path)
    # SGLang does not capture the last layer's output; all layers of this verifier hold the same.
    aux = (0, 1)
    assert aux == AUX[:2]
    drafter = make_drafter([token for token in range(8, 28) if token not in missing], aux)
    save_drafter(tmp_path / "drafter", drafter, head.config, torch.float32)
    serving = SGLangServing(
        settings=settings, spec=spec, dtype="float32", device="cpu", k=3, max_length=128,
        logs=tmp_path,
    )  # fmt: skip
    serving.check(tmp_path / "drafter")
    with serving.serve(tmp_path / "drafter") as decoder:
        served = [decoder.decode(prompt, 41) for prompt in PROMPTS]
    local = decode_locally(spec, head, tmp_path / "drafter", 41)
    for prompt, answer, expected in zip(PROMPTS, served, local, strict=True):
        assert answer.token_ids == chain(prompt[-1], 41) == expected.token_ids
        assert (answer.verify_steps, answer.accepted) == (expected.verify_steps, expected.accepted)
        assert answer.accepted_per_position == expected.accepted_per_position
        if missing:
            assert 0 < answer.accepted < answer.drafted
        else:
            assert answer.accepted_per_position == [10, 10, 10] and answer.verify_steps == 10


def test_a_drafter_that_sglang_would_serve_as_another_is_refused(
    llama: VerifierSpec, deepseek: VerifierSpec, tmp_path: Path
) -> None:
    head = head_of(llama, tmp_path)
    everything = DraftVocabulary.from_targets(torch.arange(llama.vocab_size), llama.vocab_size)
    drafter = new_drafter(head, everything, (0, 2, 4), DrafterSettings(), seed=0)
    save_drafter(tmp_path / "drafter", drafter, head.config, torch.float32)
    check_drafter(tmp_path / "drafter", llama)
    with pytest.raises(HarnessError, match="layer 0 first"):
        check_drafter(tmp_path / "drafter", deepseek)
    wider = llama.model_copy(update={"hidden_size": 128})
    with pytest.raises(HarnessError, match=r"belong together[\s\S]*target_hidden_size 128"):
        check_drafter(tmp_path / "drafter", wider)
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    del config["eagle_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(HarnessError, match=r"other layers[\s\S]*no such key"):
        check_drafter(tmp_path / "drafter", llama)


def test_counts_of_an_answer() -> None:
    def reply(**meta: Any) -> dict[str, Any]:
        return {"output_ids": [4, 5], "meta_info": meta}

    got = counted(
        reply(
            spec_verify_ct=9, spec_num_correct_drafts=11, spec_correct_drafts_histogram=[3, 3, 1, 2]
        ),
        3, seconds=1.0, where="here",
    )  # fmt: skip
    assert (got.verify_steps, got.drafted, got.accepted) == (9, 27, 11)
    assert got.accepted_per_position == [6, 3, 2]
    assert counted(reply(), 0, seconds=1.0, where="here").accepted_per_position == []
    with pytest.raises(HarnessError, match="disagree"):
        counted(reply(spec_verify_ct=2, spec_num_correct_drafts=1), 3, seconds=1.0, where="here")
    with pytest.raises(HarnessError, match="more tokens a step"):
        counted(reply(spec_verify_ct=2), 0, seconds=1.0, where="here")


def test_without_sglang_the_way_to_it_is_named(llama: VerifierSpec, tmp_path: Path) -> None:
    nowhere = ServerSettings(environment=str(tmp_path))
    open_engine = sglang_engine(
        nowhere, llama, [0], dtype="float32", device="cpu", batch_tokens=8, longest=8, work=tmp_path
    )
    with pytest.raises(HarnessError, match=r"not installed[\s\S]*make engines"), open_engine:
        pass
    given = ServerSettings(urls=["http://127.0.0.1:9"])
    open_engine = sglang_engine(
        given, llama, [0], dtype="float32", device="cpu", batch_tokens=8, longest=8, work=tmp_path
    )
    with pytest.raises(HarnessError, match=r"server\.states"), open_engine:
        pass
