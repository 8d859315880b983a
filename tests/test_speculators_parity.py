"""The same numbers as a peer: loss and gradients of the PyPI package `speculators==0.9.0`.

What it answered for a tiny drafter is in `recorded/speculators.safetensors`; record again with

    make .venv-speculators/.ready
    .venv-speculators/bin/python -m tests.record_speculators tests/recorded/speculators.safetensors
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3.dataset import Document
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.loss import TargetHead
from eagle3.objective import ObjectiveSettings, objective
from eagle3.packing import Batch, pack
from eagle3.vocab import DraftVocabulary
from tests.record_speculators import SIZES, STEPS, VARIANTS

RECORDED = Path(__file__).parent / "recorded" / "speculators.safetensors"


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    with safe_open(RECORDED, framework="pt") as file:
        about = {name: json.loads(value) for name, value in file.metadata().items()}
        # What is tested here is what was recorded there.
        assert about["speculators"] == "0.9.0"
        assert about["sizes"] == SIZES
        assert about["variants"] == {name: list(names) for name, names in VARIANTS.items()}
    return load_file(RECORDED)


def make_batch(recorded: dict[str, torch.Tensor], logits_NV: torch.Tensor) -> Batch:
    lengths = recorded["batch/lengths"].tolist()
    names = ("token_ids", "loss_mask", "aux", "final")
    parts = zip(*(recorded[f"batch/{name}"].split(lengths) for name in names), strict=True)
    lse, top1 = logits_NV.logsumexp(-1).split(lengths), logits_NV.argmax(-1).split(lengths)
    documents = [
        Document(
            id=str(i), source="recorded", token_ids=tokens.int(), loss_mask=mask.byte(), aux=aux,
            final=final, verifier_top1=top1[i].int(), verifier_lse=lse[i],
        )
        for i, (tokens, mask, aux, final) in enumerate(parts)
    ]  # fmt: skip
    return pack(documents, max_length=64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_peers(variant: str, recorded: dict[str, torch.Tensor]) -> None:
    weights = {
        name.removeprefix("weight/"): value
        for name, value in recorded.items()
        if name.startswith("weight/")
    }
    config = DrafterConfig(**SIZES, aux_layers=(0, 1, 2), **dict.fromkeys(VARIANTS[variant], True))
    drafter = Drafter(config, weights["embed"])
    names = [name for name, _ in drafter.named_parameters()]
    drafter.load_state_dict({name: weights[name] for name in names}, strict=False)
    drafter.lm_head.weight.requires_grad_(False)
    target_ids = weights["d2t"] + torch.arange(config.draft_vocab_size)
    vocabulary = DraftVocabulary.from_targets(target_ids, config.vocab_size)
    head = TargetHead(
        weights["verifier_lm_head"][target_ids], weights["verifier_norm"], config.rms_norm_eps, None
    )
    whole = TargetHead(weights["verifier_lm_head"], head.norm_G, head.eps, None)
    batch = make_batch(recorded, whole.logits(recorded["batch/final"]))
    outcome = objective(
        drafter,
        batch,
        head,
        vocabulary,
        ObjectiveSettings(ttt_steps=STEPS, step_decay=1.0, outside_rows="keep"),
        dtype=torch.float32,
        measure=True,
    )
    assert min(outcome.rows) > 15
    # Its loss is the divergence: cross-entropy less the verifier's own entropy.
    torch.testing.assert_close(
        torch.stack(outcome.divergences), recorded[f"{variant}/loss"], rtol=1e-4, atol=0
    )
    outcome.loss.backward()
    trained = [name for name in names if name != "lm_head.weight"]
    prefix = f"{variant}/gradient/"
    assert {n.removeprefix(prefix) for n in recorded if n.startswith(prefix)} == set(trained)
    for name, parameter in drafter.named_parameters():
        if name in trained:
            theirs = recorded[prefix + name]
            assert parameter.grad is not None
            scale = theirs.abs().max().item()
            torch.testing.assert_close(
                parameter.grad, theirs, rtol=1e-4, atol=1e-4 * scale, msg=name
            )


def test_variants_differ(recorded: dict[str, torch.Tensor]) -> None:
    """Each switch shows in the recorded numbers, so that ignoring one would fail above."""
    for variant in list(VARIANTS)[1:]:
        apart = (recorded[f"{variant}/loss"] / recorded["plain/loss"] - 1).abs()
        # norm_output leaves step 0 as it is.
        assert (apart[1 if variant == "norm_output" else 0 :] > 1e-3).all()


@pytest.mark.slow
def test_the_package_still_answers_so(
    recorded: dict[str, torch.Tensor], project_root: Path, tmp_path: Path
) -> None:
    python = project_root / ".venv-speculators" / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with the package: make .venv-speculators/.ready")
    again = tmp_path / "again.safetensors"
    subprocess.run(
        [python, "-m", "tests.record_speculators", again],
        check=True, timeout=500, cwd=project_root,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = load_file(again)
    assert found.keys() == recorded.keys()
    for name, value in recorded.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
