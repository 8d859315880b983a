"""What served evaluation makes of a server's answers, by hand; drafters that vLLM would misread."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from eagle3.decode import Decoded
from eagle3.engines.served import Answer
from eagle3.engines.server import ServerSettings
from eagle3.engines.vllm_decoding import VllmServing
from eagle3.errors import HarnessError
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.local_decoding import Prompt
from eagle3.served_decoding import decode_served, served_counts, served_speed, serving_engine
from eagle3.verifier import VerifierSpec
from tests.tiny_head import saved

PROMPTS = [Prompt("a", [1, 2]), Prompt("b", [3])]
PLAIN = [Answer(token_ids=[5, 6, 7, 8], seconds=2.0), Answer(token_ids=[5, 5, 5], seconds=1.5)]
DRAFTED = [
    Answer(
        token_ids=[5, 6, 7, 8], seconds=1.0, verify_steps=2, drafted=6, accepted=3,
        accepted_per_position=[2, 1, 0],
    ),
    Answer(
        token_ids=[5, 9, 5], seconds=0.75, verify_steps=2, drafted=6, accepted=1,
        accepted_per_position=[1, 0, 0],
    ),
]  # fmt: skip


class Fake:
    """An engine whose answers are known; the first of each server is the warm-up's."""

    name = "fake"

    def __init__(self) -> None:
        self.asked: list[tuple[bool, int, int]] = []

    def check(self, drafter: Path) -> None:
        return

    @contextlib.contextmanager
    def serve(self, drafter: Path | None) -> Iterator[FakeDecoder]:
        yield FakeDecoder(self, drafter is not None)


class FakeDecoder:
    version = "1.2"

    def __init__(self, engine: Fake, drafts: bool) -> None:
        self.engine, self.drafts = engine, drafts

    def decode(self, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
        self.engine.asked.append((self.drafts, len(prompt_ids), max_tokens))
        answers = DRAFTED if self.drafts else PLAIN
        return answers[0 if len(prompt_ids) == 2 else 1]


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    assert list(token_ids) == [3, 5]
    logits = torch.zeros(12, dtype=torch.float64)
    logits[5], logits[9] = 2.0, 1.75
    return logits


def test_counts_and_speeds() -> None:
    subject = Subject(None, None, Path("drafter"), "cpu")  # type: ignore[arg-type]
    settings = EvaluateSettings(engine_dtype="float32", decode_tokens=4)
    engine = Fake()
    served = decode_served(engine, subject, PROMPTS, settings)
    assert engine.asked == [
        (drafts, length, tokens)
        for drafts in (False, True)
        for length, tokens in ((2, 4), (2, 4), (1, 4))
    ]
    local = [
        Decoded(token_ids=[5, 6, 7, 8], verify_steps=2, accepted_per_position=[2, 1, 0]),
        Decoded(token_ids=[5, 9, 5], verify_steps=2, accepted_per_position=[0, 0, 0]),
    ]
    counts = served_counts(served, PROMPTS, local, 3, logits_after)
    assert counts["tau"] == 2.0 and counts["verify_steps"] == 4 and counts["accepted"] == 4
    assert counts["accepted_per_position"] == [3, 1, 0]
    assert counts["per_position_unconditional"] == [0.75, 0.25, 0.0]
    assert counts["old_sglang_rate"] == 0.5  # (4 + 4) / (4 * 4)
    assert counts["tokens"] == 7 and counts["equal_to_plain"] == 1 and counts["equal_to_local"] == 1
    assert counts["differences"] == [
        {"id": "b", "position": 1, "plain": 5, "speculative": 9, "gap": 0.25}
    ]
    speed = served_speed(served)
    assert speed["plain_tokens_per_s"] == 2.0 and speed["speculative_tokens_per_s"] == 4.0
    assert speed["speedup"] == 2.0


def test_the_local_engine_needs_no_server(tmp_path: Path) -> None:
    subject = Subject(None, None, tmp_path, "cpu")  # type: ignore[arg-type]
    assert serving_engine(subject, PROMPTS, EvaluateSettings(), tmp_path) is None


@pytest.mark.parametrize(
    ("told", "message"),
    [(None, "other layers"), ([0, 2, 3], "other layers"), ([4, 1, 3], "another order")],
)
def test_drafters_that_vllm_would_misread(
    tiny_verifier: Path, tmp_path: Path, told: list[int] | None, message: str
) -> None:
    path = saved(tmp_path / "drafter") / "config.json"
    values = json.loads(path.read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    values["eagle_aux_hidden_state_layer_ids"] = told
    if message == "another order":
        values["aux_layers"] = [layer - 1 for layer in told or []]
    path.write_text(json.dumps(values))
    engine = VllmServing(
        settings=ServerSettings(urls=["http://127.0.0.1:1"] * 2),
        spec=VerifierSpec.open(tiny_verifier), dtype="float32", device="cpu", k=3,
        max_length=10, logs=tmp_path,
    )  # fmt: skip
    with pytest.raises(HarnessError, match=message):
        engine.check(path.parent)
