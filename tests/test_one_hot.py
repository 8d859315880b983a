"""The hand-built pair behaves as its docstring says, in the local engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.cached_verifier import CachedVerifier
from eagle3.chain import ChainProposer
from eagle3.decode import speculative_decode
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_model
from tests.one_hot import AUX, chain, make_drafter, write_verifier


@pytest.mark.parametrize("missing", [(), (11,)])
def test_drafts_are_right_where_they_can_be(tmp_path: Path, missing: tuple[int, ...]) -> None:
    spec = VerifierSpec.open(write_verifier(tmp_path / "verifier"))
    verifier = CachedVerifier(load_model(spec, torch.float32, "cpu"), AUX)
    draftable = [token for token in range(8, 28) if token not in missing]
    got = speculative_decode(
        verifier, ChainProposer(make_drafter(draftable)), [5, 40, 9], k=3, max_tokens=41
    )
    assert got.token_ids == chain(9, 41)
    if not missing:
        assert got.accepted == 3 * got.verify_steps == 30
    else:
        # A token that cannot be drafted ends the chain before it; every 20 tokens it comes.
        assert 0 < got.accepted < 3 * got.verify_steps
        assert got.accepted + got.verify_steps + 1 >= 41
