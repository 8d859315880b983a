"""The final state's norm and row, told from the data and the head alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.dataset import Document
from eagle3.final_check import FinalCheck, check_final
from eagle3.reference import head_norm
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head, write_head
from tests.faulty import Lab


def answered(documents: list[Document]) -> list[Document]:
    """The tokens that the verifier would have written: row t's argmax stands at t + 1."""
    made = []
    for document in documents:
        tokens = document.token_ids.clone()
        tokens[1:] = document.verifier_top1[:-1]
        made.append(replace(document, token_ids=tokens))
    return made


def checked(lab: Lab, documents: list[Document], declared: str = "post_norm") -> FinalCheck:
    found = check_final(answered(documents), lab.head, lab.norm, declared)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_right_states(lab: Lab) -> None:
    found = checked(lab, lab.documents())
    assert found.faults == [] and (found.norms, found.shift) == (1, 0)
    assert found.top1_agreement == 1.0 == found.accuracies["post_norm"] and found.lse_error < 0.02
    assert checked(lab, lab.documents(norms=0), "pre_norm").faults == []


def test_loss_by_hand(lab: Lab) -> None:
    """Against cross-entropy of the model's own logits over the rows that count."""
    documents = answered(lab.documents())
    found = checked(lab, lab.documents())
    losses = []
    for document in documents:
        logits = document.final.float() @ lab.head.lm_head.float().T
        every = torch.nn.functional.cross_entropy(
            logits[:-1], document.token_ids[1:].long(), reduction="none"
        )
        losses.append(every[: len(document.token_ids) - 3])
    assert found.rows == sum(map(len, losses))
    assert found.losses["post_norm"] == pytest.approx(float(torch.cat(losses).mean()), abs=2e-2)


@pytest.mark.parametrize(
    ("norms", "declared", "text"),
    [
        (0, "post_norm", "final is pre-norm, declared post-norm"),
        (1, "pre_norm", "final is post-norm, declared pre-norm"),
        (2, "post_norm", "final went through the last norm twice, declared post-norm"),
        (2, "pre_norm", "final went through the last norm twice, declared pre-norm"),
    ],
)
def test_wrong_norm(lab: Lab, norms: int, declared: str, text: str) -> None:
    (fault,) = checked(lab, lab.documents(norms=norms), declared).faults
    assert fault.startswith(text) and "of the next tokens right instead of" in fault


def test_a_second_norm_is_undone(lab: Lab) -> None:
    """The loss of twice-normed states, read as such, is the loss of the right ones."""
    right, twice = checked(lab, lab.documents()), checked(lab, lab.documents(norms=2))
    assert twice.losses["twice"] == pytest.approx(right.losses["post_norm"], abs=0.03)


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_shifted_rows(lab: Lab, shift: int) -> None:
    found = checked(lab, lab.documents(final_shift=shift))
    assert found.shift == shift and len(found.faults) == 1
    assert f"token t {'+' if shift > 0 else '-'} {abs(shift)}" in found.faults[0]


def test_two_faults(lab: Lab) -> None:
    assert len(checked(lab, lab.documents(norms=0, final_shift=1)).faults) == 2


def test_argmax_of_other_rows(lab: Lab) -> None:
    documents = [
        replace(d, verifier_top1=d.verifier_top1.roll(1)) for d in answered(lab.documents())
    ]
    found = check_final(documents, lab.head, lab.norm, "post_norm")
    assert found is not None and "verifier_top1" in found.faults[0]


def test_random_tokens_say_nothing(lab: Lab) -> None:
    """Where no reading predicts the tokens, none is preferred to the declared one."""
    found = check_final(lab.documents(), lab.head, lab.norm, "post_norm")
    assert found is not None and found.norms == 1 and found.shift == 0
    nothing = [
        replace(d, loss_mask=torch.zeros_like(d.loss_mask)) for d in answered(lab.documents())
    ]
    assert check_final(nothing, lab.head, lab.norm, "post_norm") is None


def test_weight_of_one_hides_a_second_norm(tiny_verifier: Path, tmp_path: Path) -> None:
    """With unit weights the norm of a normed state is itself: no fault, and none is named."""
    spec = VerifierSpec.open(tiny_verifier)
    write_head(spec, tmp_path / "head.safetensors")
    head = read_head(tmp_path / "head.safetensors")
    rng = torch.Generator().manual_seed(0)
    norm = head_norm(head)
    final = norm(torch.randn(40, spec.hidden_size, generator=rng))
    logits = final @ head.lm_head.float().T
    tokens = torch.cat([torch.zeros(1), logits.argmax(-1)[:-1]]).int()
    document = Document(
        id="0",
        source="made_up",
        token_ids=tokens,
        loss_mask=torch.ones(40, dtype=torch.uint8),
        aux=final[:, None],
        final=norm(final),
        verifier_top1=logits.argmax(-1).int(),
        verifier_lse=logits.logsumexp(-1),
    )
    found = check_final([document], head, norm, "post_norm")
    assert found is not None and found.faults == []
