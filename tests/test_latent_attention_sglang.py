"""SGLang itself with latent attention, as of DeepSeek-V3 and Kimi-K2.5: which of its backends, and
by value. Shapes are tiny, their structure is the published one.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.dataset import StatesDataset
from eagle3.engines.server import ServerSettings, running
from eagle3.engines.sglang import serving_launch, states_launch
from eagle3.engines.sglang_decoding import SGLangServing
from eagle3.errors import HarnessError
from eagle3.extraction.base import ExtractSettings
from eagle3.extraction.run import extract
from eagle3.extraction.sglang import check_capture, sglang_engine
from eagle3.extraction.transformers import TransformersEngine
from eagle3.layer_ids import from_sglang
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import decoder_of, load_model
from tests.engine_checks import installed
from tests.fake_server import TELLS, launch
from tests.families import make_family
from tests.states_checks import compare, documents, meta_of, relative_error, responses
from tests.tiny import make_tiny_tokenizer

SGLANG = installed("sglang")
meta = partial(meta_of, engine="sglang", version="0.5.23")


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


@pytest.mark.slow
def test_states_of_latent_attention_and_experts(deepseek: VerifierSpec, tmp_path: Path) -> None:
    """SGLang's code for DeepSeek and Kimi, layers asked for by their raw ids, in an order of our
    own."""
    layers = [3, 0, 2]
    extraction = ExtractSettings(backend="sglang", dtype="float32", batch_tokens=64)
    with sglang_engine(
        SGLANG, deepseek, layers, dtype="float32", device="cpu", batch_tokens=64, longest=120,
        work=tmp_path,
    ) as engine:  # fmt: skip
        check_capture(engine.servers[0], deepseek, layers)
        extract(
            engine, responses(deepseek), tmp_path / "states",
            meta=meta(deepseek, layers, "float32"), settings=extraction, ahead=2,
        )  # fmt: skip
    errors = compare(deepseek, StatesDataset.open(tmp_path / "states"), "float32")
    assert set(errors) == {*layers, "final", "lse"}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.slow
def test_states_of_a_nested_kimi(tmp_path: Path) -> None:
    """Kimi-K2.5's whole structure, vision tower and nested configuration included. The published
    folder brings code of its own for images, which SGLang asks for at its start unless the
    configuration says that there is text only."""
    make_family("kimi_k25", tmp_path / "verifier")
    spec = VerifierSpec.open(tmp_path / "verifier")
    text_only = ["--json-model-override-args", '{"language_model_only": true}']
    layers = [3, 1, 2]
    told = documents(spec.vocab_size)
    with sglang_engine(
        SGLANG.model_copy(update={"arguments": text_only}), spec, layers, dtype="float32",
        device="cpu", batch_tokens=64, longest=120, work=tmp_path,
    ) as engine:  # fmt: skip
        found = engine.extract(told)
    # The text decoder alone: the whole model takes two ids for places of images.
    model = load_model(spec, torch.float32, "cpu")
    expected = TransformersEngine(model, decoder_of(model), layers)
    for ours, theirs in zip(found, expected.extract(told), strict=True):
        for column in range(len(layers)):
            assert relative_error(ours.aux_TnH[:, column], theirs.aux_TnH[:, column]) < 1e-4
        assert relative_error(ours.final_TH, theirs.final_TH) < 1e-4
        assert torch.equal(ours.top1_T, theirs.top1_T)
        torch.testing.assert_close(ours.lse_T, theirs.lse_T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_attention_that_misreads_the_latent_cache_is_refused(
    deepseek: VerifierSpec, tmp_path: Path
) -> None:
    """As the server itself tells it, whoever chose it."""
    chosen = SGLANG.model_copy(
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
