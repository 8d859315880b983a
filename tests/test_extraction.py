"""Extracted states, by value, against what transformers itself returns for one document alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eagle3.dataset import StatesDataset, StatesMeta
from eagle3.errors import HarnessError
from eagle3.extraction.base import EngineIdentity, ExtractSettings, States, choose_layers
from eagle3.extraction.run import extract, plan_batches
from eagle3.extraction.transformers import TransformersEngine
from eagle3.responses import Response, read_responses, read_splits

LAYERS = [1, 3, 4]
LENGTHS = (7, 1, 12, 12, 4)


def tiny_model(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(3)
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.Gemma2Config(**sizes, query_pre_attn_scalar=4, sliding_window=5)
    config.final_logit_softcapping = 3.0
    return transformers.Gemma2ForCausalLM(config).eval()


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator, dtype=torch.int32) for n in LENGTHS]


def softcap(model: Any) -> float | None:
    return getattr(model.config, "final_logit_softcapping", None)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_states_by_value(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of 5 rows, summed 2 at a time: borders fall inside documents.
    monkeypatch.setattr("eagle3.extraction.logits._PRODUCT_BYTES", 5 * 97 * 4)
    monkeypatch.setattr("eagle3.extraction.logits._SUM_BYTES", 2 * 97 * 4)
    model = tiny_model(kind)
    engine = TransformersEngine(model, model.model, LAYERS, logit_softcap=softcap(model))
    assert engine.identity.final_hidden == "post_norm"
    ragged = documents()
    for tokens, found in zip(ragged, engine.extract(ragged), strict=True):
        with torch.no_grad():
            alone = model(tokens[None].long(), output_hidden_states=True)
        for column, k in enumerate(LAYERS[:2]):
            torch.testing.assert_close(
                found.aux_TnH[:, column], alone.hidden_states[k + 1][0], rtol=1e-5, atol=1e-5
            )
        torch.testing.assert_close(found.final_TH, alone.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
        logits = alone.logits[0].double()
        assert torch.equal(found.top1_T, logits.argmax(-1).int())
        assert found.lse_T.dtype == torch.float32
        torch.testing.assert_close(
            found.lse_T.double(), logits.exp().sum(-1).log(), rtol=1e-5, atol=1e-5
        )


def test_last_layer_is_before_the_norm_and_final_after_it() -> None:
    model = tiny_model("llama")
    engine = TransformersEngine(model, model.model, [4])
    found = engine.extract(documents()[:1])[0]
    with torch.no_grad():
        normed = model.model.norm(found.aux_TnH[:, 0])
    assert not torch.allclose(found.aux_TnH[:, 0], found.final_TH, atol=1e-2)
    torch.testing.assert_close(normed, found.final_TH, rtol=1e-5, atol=1e-5)


def test_a_layer_that_looks_ahead_gets_a_mask() -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn.is_causal = False
    engine = TransformersEngine(model, model.model, LAYERS)
    seen = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    engine.extract(documents()[:2])
    assert seen[0].tolist() == [[1] * 7, [1] + [0] * 6]


def test_batches_hold_like_lengths() -> None:
    assert plan_batches([3, 9, 3, 5, 20, 4], 10) == [[4], [1], [3, 5], [0, 2]]
    assert plan_batches([2, 2, 2], 6) == [[0, 1, 2]]
    lengths = torch.randint(1, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = plan_batches(lengths, 1000)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1000 for batch in batches)


def test_default_layers_and_bad_ones() -> None:
    # transformers' hidden_states 2, 15, 27 of SmolLM2 and 2, 30, 58 of Kimi-K2.5
    assert choose_layers(None, 30, where="extract") == [1, 14, 26]
    assert choose_layers(None, 61, where="extract") == [1, 29, 57]
    assert choose_layers([4, 0], 5, where="extract") == [4, 0]
    with pytest.raises(HarnessError, match=r"no such layer[\s\S]*from 0 to 4"):
        choose_layers([0, 5], 5, where="extract")
    with pytest.raises(HarnessError, match="none twice"):
        choose_layers([1, 1], 5, where="extract")
    with pytest.raises(HarnessError, match="seven layers or more"):
        choose_layers(None, 5, where="extract")


class Fake:
    """States that a test can tell: aux is the token id, final its negative."""

    identity = EngineIdentity(engine="fake", version="1", final_hidden="post_norm")

    def __init__(self, dies_at: int | None = None, spoilt: int | None = None) -> None:
        self.calls: list[list[int]] = []
        self.dies_at, self.spoilt = dies_at, spoilt

    def extract(self, batch: Sequence[torch.Tensor]) -> list[States]:
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        self.calls.append([len(tokens) for tokens in batch])
        made = []
        for tokens in batch:
            wide = tokens.float()[:, None].expand(-1, 4)
            rows = len(tokens) - (len(tokens) == self.spoilt)
            made.append(
                States(
                    aux_TnH=wide[:, None].expand(-1, 2, -1).contiguous(),
                    final_TH=(-wide[:rows]).contiguous(),
                    top1_T=tokens + 1,
                    lse_T=tokens.float(),
                )
            )
        return made


FAKE_META = StatesMeta(
    verifier="tiny", config_hash="abc", engine="fake", engine_version="1", aux_layers=[0, 1],
    final_hidden="post_norm", dtype="float32", hidden_size=4, vocab_size=100,
)  # fmt: skip
# 61 bytes a row: a shard closes in the middle of the second batch.
FAKE_SETTINGS = ExtractSettings(batch_tokens=12, shard_bytes=61 * 13)


def responses(lengths: Sequence[int] = (6, 4, 5, 3, 3, 2)) -> list[Response]:
    return [
        Response(id=f"r{i}", source="s", token_ids=list(range(i, i + n)), loss_mask=[(n // 2, n)])
        for i, n in enumerate(lengths)
    ]


FP8_META = FAKE_META.model_copy(update={"codec": "fp8"})
FP8_SETTINGS = FAKE_SETTINGS.model_copy(update={"codec": "fp8", "shard_bytes": 37 * 13})


def run(
    engine: Fake,
    folder: Path,
    lengths: Sequence[int] = (6, 4, 5, 3, 3, 2),
    codec: str = "none",
) -> Any:
    meta, settings = (FP8_META, FP8_SETTINGS) if codec == "fp8" else (FAKE_META, FAKE_SETTINGS)
    return extract(engine, responses(lengths), folder, meta=meta, settings=settings)


def test_rows_belong_to_their_tokens(tmp_path: Path) -> None:
    result = run(Fake(), tmp_path / "a")
    assert result.tokens == 23 and result.meta.rows == 23
    dataset = StatesDataset.open(tmp_path / "a", verify=True)
    assert dataset.ids == ["r0", "r2", "r1", "r3", "r4", "r5"]
    one = dataset[2]
    assert one.token_ids.tolist() == [1, 2, 3, 4] and one.loss_mask.tolist() == [0, 0, 1, 1]
    assert one.aux[:, 1, 3].tolist() == [1, 2, 3, 4] and one.final[:, 0].tolist() == [
        -1,
        -2,
        -3,
        -4,
    ]
    assert one.verifier_top1.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_interrupted_extraction_goes_on(tmp_path: Path, codec: str) -> None:
    whole = Fake()
    run(whole, tmp_path / "whole", codec=codec)
    assert whole.calls == [[6, 5], [4, 3, 3], [2]]
    with pytest.raises(KeyboardInterrupt):
        run(Fake(dies_at=2), tmp_path / "cut", codec=codec)
    resumed = Fake()
    result = run(resumed, tmp_path / "cut", codec=codec)
    # The first shard holds the first batch and one document of the second, which runs in whole.
    assert resumed.calls == [[4, 3, 3], [2]] and result.tokens == 8
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "cut").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    assert run(Fake(), tmp_path / "whole", codec=codec).tokens == 0
    states = StatesDataset.open(tmp_path / "whole", verify=True)
    assert states.meta.codec == codec and states[2].aux[:, 1, 3].tolist() == [1, 2, 3, 4]
    # What is computed from the states is computed before they are rounded.
    assert states[2].verifier_lse.tolist() == [1, 2, 3, 4]


def test_missing_rows_name_the_sample(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"final does not fit[\s\S]*sample r2"):
        run(Fake(spoilt=5), tmp_path / "a")
    assert not (tmp_path / "a" / "meta.json").exists()


def test_states_of_other_responses_are_not_continued(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Fake(dies_at=2), tmp_path / "a")
    with pytest.raises(HarnessError, match="those of other responses"):
        run(Fake(), tmp_path / "a", lengths=(6,))


GOOD = {"id": "a", "source": "s", "token_ids": [1, 2, 3], "loss_mask": [[1, 3]], "sampling": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, "2", 3]}, "token_ids.1"),
        ({"token_ids": [1, 2, 97]}, "outside the verifier's vocabulary"),
        ({"token_ids": [1] * 65}, "longer than the verifier's context"),
        ({"loss_mask": [[1, 4]]}, "loss mask does not fit"),
        ({"loss_mask": [[2, 3], [1, 2]]}, "loss mask does not fit"),
        ({"loss_mask": None}, "loss_mask"),
        ({"id": "first"}, "the same response twice"),
    ],
)
def test_bad_responses_name_file_and_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "train.jsonl"
    lines = [{**GOOD, "id": "first"}, {**GOOD, **change}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(HarnessError, match=message) as raised:
        read_responses(path, vocab_size=97, max_length=64)
    assert f"{path}, line 2" in str(raised.value)


def test_files_that_hold_no_responses(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with pytest.raises(HarnessError, match="no responses"):
        read_splits(tmp_path, vocab_size=97)
    path.write_text("")
    with pytest.raises(HarnessError, match="file is empty"):
        read_responses(path, vocab_size=97)
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:20] + "\n")
    with pytest.raises(HarnessError, match=r"malformed response[\s\S]*line 2"):
        read_responses(path, vocab_size=97)
    path.write_text(json.dumps(GOOD) + "\n")
    (only,) = read_splits(tmp_path, vocab_size=97)["train"]
    assert only.mask().tolist() == [0, 1, 1] and only.tokens().dtype == torch.int32


def test_stages_on_a_tiny_verifier(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages as programs: states equal transformers' own, nothing half-written is left."""
    from transformers import AutoModelForCausalLM

    from eagle3.vocab import read_vocabulary
    from stages import extract as extract_stage
    from stages import vocab as vocab_stage
    from stages.runner import run_stage

    monkeypatch.chdir(tmp_path)
    threads = int(os.environ["OMP_NUM_THREADS"])
    Path("params.yaml").write_text(
        f"run: {{threads: {threads}, seed: 0, device: cpu}}\n"
        "extract: {dtype: float32, aux_layers: [0, 2, 3], batch_tokens: 16}\n"
        "vocab: {size: 11}\n"
    )
    Path("responses").mkdir()
    for split in ("train", "dev"):
        lines = [
            {**GOOD, "id": f"{split}{n}", "token_ids": list(range(3 + n, 9 + 2 * n)),
             "loss_mask": [[2, 4 + n]]}
            for n in range(5)
        ]  # fmt: skip
        Path(f"responses/{split}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    common = ["--verifier", str(tiny_verifier), "--responses", "responses"]
    run_stage(
        "extract", extract_stage.main, extract_stage.add_arguments, [*common, "--out", "states"]
    )
    run_stage(
        "vocab", vocab_stage.main, vocab_stage.add_arguments,
        [*common, "--out", "vocab.safetensors", "--metrics", "vocab.json"],
    )  # fmt: skip
    assert sorted(p.name for p in Path("states").iterdir()) == ["dev", "train"]
    assert not [p for p in Path(".work").iterdir() if p.name.startswith("extract")]
    dataset = StatesDataset.open(Path("states/train"), verify=True)
    assert dataset.meta.final_hidden == "post_norm" and dataset.meta.aux_layers == [0, 2, 3]
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    for one in dataset:
        with torch.no_grad():
            alone = model(one.token_ids[None].long(), output_hidden_states=True)
        for column, k in enumerate([0, 2, 3]):
            torch.testing.assert_close(
                one.aux[:, column], alone.hidden_states[k + 1][0], rtol=1e-4, atol=1e-4
            )
        torch.testing.assert_close(one.final, alone.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            one.verifier_lse, alone.logits[0].logsumexp(-1), rtol=1e-4, atol=1e-4
        )
    vocabulary = read_vocabulary(Path("vocab.safetensors"), vocab_size=dataset.meta.vocab_size)
    # Supervised: 5-6, 6-8, 7-10, 8-12, 9-14. So 8, 9, 10 stand three times, 6, 7, 11, 12 twice and
    # 5, 13, 14 once, of which the first two find room; the tokenizer calls 1 and 2 special.
    assert vocabulary.target_ids.tolist() == [1, 2, *range(5, 14)]
    with safe_open("vocab.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["coverage"]) == {"dev": 0.95, "train": 0.95}
    metrics = json.loads(Path("vocab.json").read_text())
    assert metrics["size"] == 11
    assert metrics["splits"]["train"] == {
        "supervised": 20, "coverage": 0.95, "sources": {"s": 0.95},
    }  # fmt: skip
