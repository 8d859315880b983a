"""The decoding benchmark: what it makes of timings, and a whole run on the tiny verifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3.checkpoint import save_drafter
from eagle3.decode import Decoded
from eagle3.drafter import Drafter
from eagle3.timing import Run
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head, write_head
from experiments.benchmarks.decoding import Parts, main, shares, spread
from tests.tiny import tiny_drafter_config


def test_shares_by_hand() -> None:
    """Plain: 10 ms a token. Speculative: 4 tokens in 2 steps (τ = 2) of 20 ms: as fast as plain.
    Its parts allow verification in 11 ms and 3 drafts in 3 ms: 2 / 1.4 times plain's speed."""
    plain = Decoded(token_ids=[1] * 5, verify_steps=4, prefill_seconds=1.0, verify_seconds=0.04)
    ours = Decoded(
        token_ids=[1] * 5,
        verify_steps=2,
        accepted=2,
        prefill_seconds=1.0,
        verify_seconds=0.03,
        draft_seconds=0.01,
    )
    parts = Parts(plain=[0.01, 0.01, 0.5], verify=[0.011] * 3, chain=[0.003] * 3)
    got = shares(Run([plain], [ours]), parts, k=3)
    assert got["tau"] == 2
    assert (got["r"], got["c"]) == (pytest.approx(1.1), pytest.approx(0.1))
    assert got["bound"] == pytest.approx(2 / 1.4)
    assert got["speedup_decoding"] == pytest.approx(1.0)
    assert got["share_of_bound"] == pytest.approx(0.7)


def test_prompts_are_spread() -> None:
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert spread([1, 2], 4) == [1, 2]


@pytest.fixture(scope="module")
def inputs(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    spec = VerifierSpec.open(tiny_verifier)
    write_head(spec, folder / "head.safetensors")
    head = read_head(folder / "head.safetensors")
    config = tiny_drafter_config(spec.vocab_size, spec.vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = Drafter(config, head.embed.float())
    drafter.t2d[:] = True
    save_drafter(folder / "drafter", drafter, head.config, torch.float32)
    questions = ["How many days are there in a year?", "What is a tuple?", "Count the stones."]
    lines = [json.dumps({"messages": [{"role": "user", "content": one}]}) for one in questions]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return [
        f"--verifier={tiny_verifier}",
        f"--head={folder / 'head.safetensors'}",
        f"--checkpoint={folder / 'drafter'}",
        f"--prompts={folder / 'prompts.jsonl'}",
    ]


def test_a_run_in_float32(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp32 all four ways write the same texts, and the report is on disk as it is printed."""
    out = tmp_path / "reports" / "decode.json"
    threads = torch.get_num_threads()
    flags = ["--dtype=float32", "--count=2", "--tokens=12", f"--threads={threads}", "--repeats=2"]
    assert main([*inputs, *flags, f"--out={out}"]) == 0
    result = json.loads(out.read_text())
    assert result.pop("provenance")["settings"]["arguments"]["verifier"] == inputs[0].split("=")[1]
    assert json.loads(capsys.readouterr().out) == result
    assert result["engine"] == "lean" and result["prompts"] == 2
    ways = {"transformers_generate", "transformers_prompt_lookup", "plain", "speculative"}
    assert set(result["tokens_per_s"]) == ways
    assert all(speed > 0 for speed in result["tokens_per_s"].values())
    assert result["same_text_as_plain"] == dict.fromkeys(ways - {"plain"}, 2)
    expected = result["tau"] / (result["r"] + 3 * result["c"])
    assert result["bound"] == pytest.approx(expected)
    assert result["share_of_bound"] == pytest.approx(result["speedup_decoding"] / expected)


@pytest.mark.parametrize("flag", ["--head", "--checkpoint", "--prompts"])
def test_missing_data_is_named(
    inputs: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert main([*inputs, f"{flag}={gone}", f"--out={tmp_path / 'out.json'}"]) == 2
    said = capsys.readouterr().err
    assert str(gone) in said and flag in said and "make repro" in said
    assert not (tmp_path / "out.json").exists()
