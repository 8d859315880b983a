"""Settings of late stages that the verifier cannot serve are refused by its own stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec
from stages.fitting import check_fits


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"vocab": {"size": 100_000}}, ["params.yaml, vocab.size", "got: 100000", "at most"]),
        ({"sibling_vocab": {"size": 100_000}}, ["params.yaml, sibling_vocab.size"]),
        ({"extract": {"aux_layers": [0, 2, 5]}}, ["extract.aux_layers", "0 to 4", "[0, 2, 5]"]),
    ],
)
def test_what_does_not_fit(tiny_verifier: Path, params: dict[str, Any], parts: list[str]) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    with pytest.raises(HarnessError) as caught:
        check_fits(params, spec, where="params.yaml")
    for part in parts:
        assert part in str(caught.value)


def test_what_fits(tiny_verifier: Path) -> None:
    spec = VerifierSpec.open(tiny_verifier)
    fitting: dict[str, Any] = {"vocab": {"size": spec.vocab_size}, "extract": {"aux_layers": None}}
    check_fits(fitting, spec, where="params.yaml")
