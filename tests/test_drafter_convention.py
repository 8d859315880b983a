"""Drafters trained under a convention of one's choice: what mistakes cost them, and its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.acceptance import old_sglang_rate, summarise
from eagle3.checkpoint import save_drafter
from eagle3.drafter import Drafter, rms_norm
from eagle3.drafter_convention import Finding, investigate
from eagle3.mistakes import (
    MistakesSettings,
    best_tokens,
    mistakes,
    perfect,
    table,
    target_states,
)
from eagle3.served_as import LayeredDocument, ServedAs, computed, drafted, fed
from tests.faulty import AUX, LAYERS, Lab
from tests.memorised import few_words, memorise, new_drafter
from tests.test_contract import write

SAID = ServedAs(aux_layers=AUX)


@pytest.fixture(scope="module")
def layered(lab: Lab) -> list[LayeredDocument]:
    return few_words(lab)


@pytest.fixture(scope="module")
def right(lab: Lab, layered: list[LayeredDocument]) -> Drafter:
    drafter = new_drafter(lab)
    memorise(drafter, layered, SAID)
    return drafter.requires_grad_(False)


def finding(
    lab: Lab, layered: list[LayeredDocument], drafter: Drafter, said: ServedAs | None = SAID
) -> Finding:
    drafter.requires_grad_(False)
    return investigate(drafter, layered, lab.head, lab.norm, said, k=3, dtype=torch.float32)


def test_fed_states(layered: list[LayeredDocument]) -> None:
    item = layered[0]
    assert torch.equal(fed(item, SAID).aux, item.outputs_TLH[:, [2, 4, 6]])  # embeddings first
    assert torch.equal(fed(item, ServedAs(aux_layers=(-1, 0))).aux, item.outputs_TLH[:, [0, 1]])
    later = fed(item, replace(SAID, shift=1)).aux
    assert torch.equal(later[:-1], fed(item, SAID).aux[1:])
    assert torch.equal(later[-1], later[-2])


def test_a_variant_leaves_the_drafter_alone(right: Drafter) -> None:
    before = {name: value.clone() for name, value in right.state_dict().items()}
    made = computed(right, replace(SAID, own_norm=2, rope=False).switched("norm_output", True))
    assert made.config.norm_output and not right.config.norm_output
    assert not made.inverse_frequencies.any() and right.inverse_frequencies.all()
    assert torch.equal(made.norm.weight, right.norm.weight**2)
    assert all(torch.equal(before[name], value) for name, value in right.state_dict().items())


def test_own_norm_by_hand(right: Drafter) -> None:
    """A second norm, and none, name the same token as the weights taken twice, and not at all."""
    rng = torch.Generator().manual_seed(1)
    state, weight = torch.randn(50, 64, generator=rng), right.norm.weight
    head = right.lm_head.weight
    once = rms_norm(state, weight, 1e-5)
    for norms, wanted in ((2, rms_norm(once, weight, 1e-5)), (0, state)):
        made = computed(right, replace(SAID, own_norm=norms))  # type: ignore[arg-type]
        ours = rms_norm(state, made.norm.weight, 1e-5)
        assert torch.equal((ours @ head.T).argmax(-1), (wanted @ head.T).argmax(-1))


def test_what_mistakes_cost(lab: Lab, layered: list[LayeredDocument], right: Drafter) -> None:
    rows = table(right, layered, lab.head, lab.norm, MistakesSettings(dtype="float32"))
    tau = {row["mistake"]: row["tau"] for row in rows}
    assert tau["as trained"] > 3.5
    served = [row for row in rows if row["where"] == "serving"]
    assert len(served) == 13 and len(rows) == 15
    for name in ("every layer + 1", "every layer - 1", "layers in reversed order"):
        assert tau[name] < 0.85 * tau["as trained"], name
    assert tau["norm_before_residual: true"] < tau["as trained"]
    for row in rows:
        assert row["old_sglang_rate"] == pytest.approx(row["tau"] / 4, abs=1e-4)
    assert json.loads(json.dumps(rows)) == rows


def test_older_sglang_shows_a_quarter_for_nothing() -> None:
    # 10 rounds, 4 draft tokens each: nothing accepted, then all 3.
    assert old_sglang_rate(1.0, 3) == (0 + 10) / (10 * 4)
    assert old_sglang_rate(4.0, 3) == (30 + 10) / (10 * 4)


def test_perfect_drafts(lab: Lab, layered: list[LayeredDocument]) -> None:
    """Targets that name every next token accept all; those that never do, nothing."""
    tokens = layered[0].document.token_ids.long()
    every = summarise([perfect(layered[0], tokens.roll(-1), 3)])
    # 44 answer tokens; only the last round may look past the end of the document.
    assert every["tau"] > 3.6
    assert summarise([perfect(layered[0], torch.zeros_like(tokens), 3)])["tau"] == 1.0
    one = tokens.roll(-1)
    one[::2] = 0
    assert 1.0 < summarise([perfect(layered[0], one, 3)])["tau"] < 2.0


def test_draft_losses_by_hand(layered: list[LayeredDocument], right: Drafter) -> None:
    """Loss and first drafts against the cached drafter that serves."""
    from eagle3.drafter import DraftCache

    found = drafted(right, layered[:1], SAID, dtype=torch.float32)
    document = fed(layered[0], SAID)
    tokens = document.token_ids.long()
    rows = torch.arange(len(tokens) - 1)
    out = right.forward_cached(tokens[1:], right.fuse(document.aux[:-1]), rows, DraftCache())
    logits = right.logits(out)[found.place_R - 2]
    assert torch.equal(logits.argmax(-1), found.first_R)
    cost = torch.nn.functional.cross_entropy(logits, tokens[found.place_R], reduction="none")
    torch.testing.assert_close(found.loss_R[: len(cost)], cost, rtol=1e-3, atol=1e-4)


def test_mistakes_fit_the_verifier(right: Drafter) -> None:
    edge = ServedAs(aux_layers=(-1, 3, LAYERS - 1))
    names = [item.name for item in mistakes(edge, right.config, LAYERS)]
    assert "every layer + 1" not in names and "every layer - 1" not in names
    assert "layers in reversed order" in names


@pytest.mark.parametrize(
    "truth",
    [
        ServedAs(aux_layers=(2, 4, 6)),
        ServedAs(aux_layers=(0, 2, 4)),
        ServedAs(aux_layers=(5, 3, 1)),
        ServedAs(aux_layers=(1, 4, 7)),
        ServedAs(aux_layers=AUX, shift=-1),
        ServedAs(aux_layers=AUX, shift=1),
        ServedAs(aux_layers=AUX).switched("norm_before_residual", True),
    ],
    ids=["layer+1", "layer-1", "reversed", "others", "shift", "peeking", "residual"],
)
def test_wrong_conventions_are_named(
    lab: Lab, layered: list[LayeredDocument], truth: ServedAs
) -> None:
    drafter = new_drafter(lab)
    memorise(drafter, layered, truth)
    found = finding(lab, layered, drafter)
    assert found.found == truth, found.words
    assert found.scores[0].tau > 3.0
    assert found.scores[1].name == "as its config says"
    assert found.scores[1].tau < found.scores[0].tau
    assert any("Its config says otherwise" in line for line in found.words)


def test_an_honest_config(lab: Lab, layered: list[LayeredDocument], right: Drafter) -> None:
    found = finding(lab, layered, right)
    assert found.found == SAID and "That is what its config says." in found.words
    assert found.targets["right"] >= 0


def test_a_config_without_layers(lab: Lab, layered: list[LayeredDocument], right: Drafter) -> None:
    found = finding(lab, layered, right, said=None)
    assert found.found.aux_layers == AUX
    assert any("does not say which layers" in line for line in found.words)


@pytest.mark.parametrize("norms", [0, 2])
def test_wrong_targets_are_named(lab: Lab, layered: list[LayeredDocument], norms: int) -> None:
    """It drafts what a verifier without its norm, or with two, would say."""
    named = [best_tokens(target_states(item, norms, lab.norm), lab.head) for item in layered]
    drafter = new_drafter(lab)
    drafter.lm_head = torch.nn.Linear(64, lab.spec.vocab_size, bias=False)
    drafter.lm_head.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    drafter.config = drafter.config.model_copy(update={"draft_vocab_size": lab.spec.vocab_size})
    drafter.d2t = torch.zeros(lab.spec.vocab_size, dtype=torch.int64)
    memorise(drafter, layered, SAID, targets=named)
    found = finding(lab, layered, drafter)
    name = "without the last norm" if norms == 0 else "last norm twice"
    assert max(found.targets, key=lambda key: found.targets[key]) == name, found.targets
    assert any(f"wrong targets, of a final state {name}" in line for line in found.words)


def test_no_drafter_of_this_verifier(lab: Lab, layered: list[LayeredDocument]) -> None:
    found = finding(lab, layered, new_drafter(lab))
    assert any("no reading are its drafts better than guesses" in line for line in found.words)


@pytest.mark.slow
def test_command(
    lab: Lab, layered: list[LayeredDocument], tmp_path: Path, project_root: Path
) -> None:
    drafter = new_drafter(lab)
    truth = ServedAs(aux_layers=(2, 4, 6))
    memorise(drafter, layered, truth)
    save_drafter(tmp_path / "drafter", drafter, lab.head.config, torch.float32)
    stored = [
        replace(fed(item, SAID), aux=fed(item, SAID).aux.bfloat16(), final=item.post_TH.bfloat16(),
                verifier_top1=item.document.token_ids,
                verifier_lse=torch.zeros(len(item.document.token_ids)))
        for item in layered
    ]  # fmt: skip
    write(lab, tmp_path / "states", stored)
    command = [
        *(sys.executable, "-c", "from experiments.cli import main; main()", "diagnose"),
        *(str(tmp_path / "drafter"), "--data-dir", str(tmp_path / "states")),
        *("--verifier-path", str(lab.folder), "--dtype", "float32"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(project_root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Its drafts are best under: outputs of layers 2, 4, 6" in done.stdout
    assert "outputs of layers 1, 3, 5" in done.stdout
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    for name in ("aux_layers", "eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del config[name]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Its config does not say which layers it reads." in done.stdout
    assert "outputs of layers 2, 4, 6" in done.stdout
