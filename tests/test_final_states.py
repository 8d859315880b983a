"""Targets from final states before or after the last norm are the verifier's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from eagle3.arm import ArmData, first_drafter
from eagle3.dataset import StatesMeta
from eagle3.errors import HarnessError
from eagle3.train_settings import TrainSettings
from eagle3.verifier_head import VerifierHead
from eagle3.vocab import DraftVocabulary
from tests.test_extraction import softcap, tiny_model
from tests.tiny_head import make_head


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("final_hidden", ["pre_norm", "post_norm"])
def test_targets_are_the_verifiers_logits(
    kind: str, final_hidden: Literal["pre_norm", "post_norm"]
) -> None:
    model: Any = tiny_model(kind)
    with torch.no_grad():
        model.model.norm.weight.add_(torch.linspace(-0.5, 0.5, 16))
    config = make_head().config.model_copy(
        update={
            "hidden_size": 16, "vocab_size": 97, "rms_norm_eps": model.config.rms_norm_eps,
            "norm_offset": 1.0 if kind == "gemma2" else 0.0, "logit_softcap": softcap(model),
        }
    )  # fmt: skip
    head = VerifierHead(
        config,
        model.model.embed_tokens.weight.detach(),
        model.model.norm.weight.detach(),
        model.lm_head.weight.detach(),
        None,
    )
    meta = StatesMeta(
        verifier="tiny", config_hash="0", engine="vllm", engine_version="0", aux_layers=[0],
        final_hidden=final_hidden, dtype="float32", hidden_size=16, vocab_size=97,
    )  # fmt: skip
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _, given, out: before.append(given[0][0]))
    with torch.no_grad():
        out = model(torch.arange(3, 20)[None], output_hidden_states=True)
    final = before[0] if final_hidden == "pre_norm" else out.hidden_states[-1][0]
    words = DraftVocabulary.from_targets(torch.tensor([2, 5, 40, 96]), 97)
    target = ArmData(meta, [], [], [], head, words).as_train_data().head
    torch.testing.assert_close(
        target.logits(final.detach()), out.logits[0, :, words.target_ids], rtol=1e-4, atol=1e-4
    )


def test_layers_that_no_engine_serves_stop_before_training() -> None:
    meta = StatesMeta(
        verifier="tiny", config_hash="0", engine="vllm", engine_version="0", aux_layers=[3, 0, 2],
        final_hidden="pre_norm", dtype="float32", hidden_size=16, vocab_size=30,
    )  # fmt: skip
    words = DraftVocabulary.from_targets(torch.tensor([2, 5]), 30)
    data = ArmData(meta, [], [], [], make_head(), words)
    with pytest.raises(HarnessError, match="in another order"):
        first_drafter(Path("head.safetensors"), data, TrainSettings(lr=1e-3), 0)
