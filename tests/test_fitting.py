"""Settings of late stages that the verifier cannot serve are refused by its own stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import HarnessError
from eagle3.extraction.base import choose_layers
from eagle3.verifier import VerifierSpec
from stages.fitting import check_fits


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"vocab": {"size": 100_000}}, ["params.yaml, vocab.size", "got: 100000", "at most"]),
        ({"sibling_vocab": {"size": 100_000}}, ["params.yaml, sibling_vocab.size"]),
        ({"extract": {"aux_layers": None}}, ["extract.aux_layers", "7 layers", "5", "from 0 to 4"]),
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
    for layers in ({"aux_layers": [0, 2, 4]}, {}):
        fitting: dict[str, Any] = {"vocab": {"size": spec.vocab_size}, "extract": layers}
        check_fits(fitting, spec, where="params.yaml")


@pytest.mark.parametrize("count", range(1, 12))
def test_the_default_layers_fit_as_extraction_says(tiny_verifier: Path, count: int) -> None:
    spec = VerifierSpec.open(tiny_verifier).model_copy(update={"num_hidden_layers": count})

    def refused(check: Callable[[], object]) -> bool:
        try:
            check()
        except HarnessError:
            return True
        return False

    params = {"extract": {"aux_layers": None}}
    wanted = refused(lambda: choose_layers(None, count, where="extract"))
    assert refused(lambda: check_fits(params, spec, where="params.yaml")) == wanted
