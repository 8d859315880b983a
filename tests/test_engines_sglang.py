"""SGLang itself, on this machine, with drafters: its counts are the local engine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.checkpoint import save_drafter
from eagle3.engines.sglang_decoding import SGLangServing, check_drafter, counted
from eagle3.errors import HarnessError
from eagle3.initialise import DrafterSettings, new_drafter
from eagle3.verifier import VerifierSpec
from eagle3.vocab import DraftVocabulary
from tests.engine_checks import (
    PROMPTS,
    decode_locally,
    head_of,
    installed,
    serve_a_random_drafter,
)
from tests.one_hot import AUX, chain, make_drafter, write_verifier


@pytest.mark.slow
def test_a_random_drafter_changes_nothing(llama: VerifierSpec, tmp_path: Path) -> None:
    answers = serve_a_random_drafter("sglang", "0.5.23", llama, (0, 2, 4), tmp_path)
    for served, local in answers:
        assert (served.verify_steps, served.accepted) == (local.verify_steps, local.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [(), (11,)])
def test_a_drafter_whose_every_draft_is_known(missing: tuple[int, ...], tmp_path: Path) -> None:
    """Always right; and without a token that comes up: drafts end before it."""
    spec = VerifierSpec.open(write_verifier(tmp_path / "verifier"))
    head = head_of(spec, tmp_path)
    # SGLang does not capture the last layer's output; all layers of this verifier hold the same.
    aux = (0, 1)
    assert aux == AUX[:2]
    drafter = make_drafter([token for token in range(8, 28) if token not in missing], aux)
    save_drafter(tmp_path / "drafter", drafter, head.config, torch.float32)
    serving = SGLangServing(
        settings=installed("sglang"), spec=spec, dtype="float32", device="cpu", k=3, max_length=128,
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
    llama: VerifierSpec, tmp_path: Path
) -> None:
    head = head_of(llama, tmp_path)
    everything = DraftVocabulary.from_targets(torch.arange(llama.vocab_size), llama.vocab_size)
    drafter = new_drafter(head, everything, (0, 2, 4), DrafterSettings(), seed=0)
    save_drafter(tmp_path / "drafter", drafter, head.config, torch.float32)
    check_drafter(tmp_path / "drafter", llama)
    with pytest.raises(HarnessError, match="layer 0 first"):
        check_drafter(tmp_path / "drafter", llama.model_copy(update={"model_type": "deepseek_v3"}))
    wider = llama.model_copy(update={"hidden_size": 128})
    with pytest.raises(HarnessError, match=r"another hidden size[\s\S]*128[\s\S]*got: 64"):
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
