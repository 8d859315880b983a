"""Parity, tested by breaking it: every fault is put into states on purpose, and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from eagle3.dataset import Document
from eagle3.extraction.base import EngineIdentity
from eagle3.parity import Declared, Reading
from eagle3.parity_faults import Diagnosis, diagnose
from eagle3.reference import measured, reference_layers, spread
from experiments.benchmarks.engines import Once
from tests.faulty import AUX, LAYERS, Lab


@pytest.fixture(scope="module")
def engine(lab: Lab) -> Once:
    """In float32, so that what is stored carries the noise of bfloat16."""
    return Once(lab.engine(torch.float32))


def verdict(
    lab: Lab,
    engine: Any,
    documents: list[Document],
    final: Literal["pre_norm", "post_norm"] = "post_norm",
    aux: tuple[int, ...] = AUX,
) -> Diagnosis:
    declared = Declared(aux_layers=aux, final_hidden=final, num_hidden_layers=LAYERS)
    return diagnose(list(measured(documents, engine, lab.head, declared, max_tokens=64)), declared)


def texts(found: Diagnosis) -> list[str]:
    return [fault.text for fault in found.faults]


def kinds(found: Diagnosis) -> set[str]:
    return {fault.kind for fault in found.faults}


def test_noise_alone_is_no_fault(lab: Lab, engine: Once) -> None:
    found = verdict(lab, engine, lab.documents())
    assert texts(found) == []
    assert found.documents == 6 and found.rows == sum(min(64, len(t)) for t in lab.tokens)
    assert all(1e-4 < slot.error < slot.tolerance < slot.separation for slot in found.slots)
    assert [slot.found for slot in found.slots] == [*map(Reading, AUX), Reading(LAYERS - 1, 1)]
    # bfloat16 against itself in other company: no more noise than that.
    again = verdict(lab, lab.engine(torch.bfloat16), lab.documents())
    assert texts(again) == [] and again.largest_error < found.largest_error


def test_noise_is_as_measured(lab: Lab) -> None:
    """The floor of the tolerance is a walk of roundings; real bfloat16 differs by about as much."""
    narrow, wide = lab.states[5], lab.engine(torch.float32).extract(lab.tokens[5:])[0]
    found = verdict(lab, lab.engine(torch.bfloat16), lab.documents())
    for slot, k in zip(found.slots, AUX, strict=False):
        apart = (narrow.aux_TnH[:, k].float() - wide.aux_TnH[:, k]).norm(dim=-1)
        real = float((apart / wide.aux_TnH[:, k].norm(dim=-1)).median())
        assert slot.noise / 3 < real < 3 * slot.noise


@pytest.mark.parametrize("delta", [1, -1])
def test_layer_offset(lab: Lab, engine: Once, delta: int) -> None:
    found = verdict(lab, engine, lab.documents(aux=[k + delta for k in AUX]))
    assert [fault.kind for fault in found.faults] == ["layer_offset"]
    (text,) = texts(found)
    assert f"one too {'high' if delta > 0 else 'low'}" in text
    assert f"aux[1] is the output of layer {3 + delta}" in text and "use 1, 3, 5" in text


def test_inputs_of_the_first_layer(lab: Lab, engine: Once) -> None:
    tokens = [t.long() for t in lab.tokens]
    documents = [
        replace(d, aux=torch.cat([lab.head.embed[t][:, None].to(d.aux.dtype), d.aux[:, 1:]], 1))
        for d, t in zip(lab.documents(), tokens, strict=True)
    ]
    found = verdict(lab, engine, documents)
    assert texts(found) == [
        "aux[0] is the embeddings, the input of layer 0; serving will use layer 1"
    ]


@pytest.mark.parametrize("order", [(5, 3, 1), (3, 1, 5), (3, 5, 1)])
def test_order(lab: Lab, engine: Once, order: tuple[int, ...]) -> None:
    found = verdict(lab, engine, lab.documents(aux=order))
    assert [fault.kind for fault in found.faults] == ["aux_order"]
    assert f"aux[0] holds layer {order[0]}, aux[1] holds layer {order[1]}" in texts(found)[0]


@pytest.mark.parametrize("layer", [2, 4, 6])
def test_one_wrong_layer(lab: Lab, engine: Once, layer: int) -> None:
    found = verdict(lab, engine, lab.documents(aux=(1, layer, 5)))
    assert texts(found) == [f"aux[1] is the output of layer {layer}; serving will use layer 3"]


def test_final_norm(lab: Lab, engine: Once) -> None:
    def final(norms: int, declared: Literal["pre_norm", "post_norm"]) -> list[str]:
        return texts(verdict(lab, engine, lab.documents(norms=norms), declared))

    assert final(0, "post_norm") == ["final is pre-norm, declared post-norm"]
    assert final(1, "pre_norm") == ["final is post-norm, declared pre-norm"]
    assert final(2, "post_norm") == ["final went through the last norm twice, declared post-norm"]
    assert final(0, "pre_norm") == [] == final(1, "post_norm")


def test_final_of_an_earlier_layer(lab: Lab, engine: Once) -> None:
    found = verdict(lab, engine, lab.documents(final_layer=LAYERS - 2))
    assert texts(found) == [
        "final is the output of layer 6 after the last norm, not of the last one, 7"
    ]
    found = verdict(lab, engine, lab.documents(final_layer=LAYERS - 2, norms=0))
    assert kinds(found) == {"final_layer", "final_norm"}


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_token_shift(lab: Lab, engine: Once, shift: int) -> None:
    found = verdict(lab, engine, lab.documents(shift=shift))
    assert [fault.kind for fault in found.faults] == ["rows_shifted"]
    sign = "+" if shift > 0 else "-"
    said = f"row t holds the state of token t {sign} {abs(shift)} in 6 of 6 documents"
    assert said in texts(found)[0]
    assert ("prefix cache" in texts(found)[0]) == (shift > 0)


def test_final_alone_is_shifted(lab: Lab, engine: Once) -> None:
    found = verdict(lab, engine, lab.documents(final_shift=1))
    assert [fault.kind for fault in found.faults] == ["rows_shifted"]
    assert texts(found)[0].startswith("row t of final holds the state of token t + 1")


def test_missing_rows(lab: Lab, engine: Once) -> None:
    found = verdict(lab, engine, lab.documents(missing=1))
    assert texts(found) == [
        "the first row is missing in 6 of 6 documents: a prefix cache or chunked prefill was on"
    ]
    whole, cached = lab.documents(), lab.documents(missing=9)
    found = verdict(lab, engine, [whole[0], *cached[1:]])  # what a prefix cache really does
    assert texts(found) == [
        "the first 9 rows are missing in 5 of 6 documents: a prefix cache or chunked prefill was on"
    ]
    short = [replace(d, aux=d.aux[:-3], final=d.final[:-3]) for d in lab.documents()]
    assert texts(verdict(lab, engine, short)) == ["the last rows are missing in 6 of 6 documents"]


def test_first_row_filled_with_nothing(lab: Lab, engine: Once) -> None:
    def emptied(states: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(states[:1]), states[1:]])

    documents = [replace(d, aux=emptied(d.aux), final=emptied(d.final)) for d in lab.documents()]
    found = verdict(lab, engine, documents)
    assert kinds(found) == {"rows_missing"} and len(found.faults) == 4
    assert "the first row is missing in aux[0] of 6 of 6 documents" in texts(found)[0]


def test_rows_of_a_few_documents(lab: Lab, engine: Once) -> None:
    documents = lab.documents()
    rows = len(documents[3].final)
    mixed = torch.arange(rows).roll(rows // 3)  # a third of the rows stands elsewhere
    mixed[rows // 3 :] = torch.arange(rows)[rows // 3 :]
    documents[3] = replace(documents[3], final=documents[3].final[mixed])
    found = verdict(lab, engine, documents)
    assert kinds(found) == {"rows_wrong"} and "sample 0003" in texts(found)[0]


@pytest.mark.parametrize(
    ("made", "declared", "named"),
    [
        ({"aux": (2, 4, 6), "norms": 0}, "post_norm", {"layer_offset", "final_norm"}),
        ({"aux": (4, 2, 6)}, "post_norm", {"layer_offset", "aux_order"}),
        ({"aux": (5, 3, 1), "norms": 2}, "pre_norm", {"aux_order", "final_norm"}),
        ({"shift": 1, "norms": 2}, "post_norm", {"rows_shifted", "final_norm"}),
        ({"aux": (0, 2, 4), "missing": 1}, "post_norm", {"layer_offset", "rows_missing"}),
        ({"aux": (1, 4, 5), "shift": -1}, "pre_norm", {"aux_layer", "rows_shifted", "final_norm"}),
    ],
)
def test_several_faults(
    lab: Lab,
    engine: Once,
    made: dict[str, Any],
    declared: Literal["pre_norm", "post_norm"],
    named: set[str],
) -> None:
    found = verdict(lab, engine, lab.documents(**made), declared)
    assert kinds(found) == named and len(found.faults) == len(named), texts(found)


def test_two_wrong_layers(lab: Lab, engine: Once) -> None:
    assert texts(verdict(lab, engine, lab.documents(aux=(5, 3, 2)))) == [
        "aux[0] is the output of layer 5; serving will use layer 1",
        "aux[2] is the output of layer 2; serving will use layer 5",
    ]


def test_states_of_another_verifier(lab: Lab, engine: Once) -> None:
    rng = torch.Generator().manual_seed(0)
    documents = [
        replace(d, aux=torch.randn(d.aux.shape, generator=rng).to(d.aux.dtype))
        for d in lab.documents()
    ]
    found = verdict(lab, engine, documents)
    assert kinds(found) == {"unknown"} and len(found.faults) == 3
    assert "aux[0] is no state of this verifier" in texts(found)[0]


def test_an_engine_with_pre_norm_final_states(lab: Lab, engine: Once) -> None:
    """What vLLM gives: the same verdict, through the verifier's own norm."""

    class PreNorm:
        identity = EngineIdentity(engine="made_up", version="0", final_hidden="pre_norm")

        def extract(self, batch: Any) -> list[Any]:
            return [
                replace(states, final_TH=states.aux_TnH[:, -1]) for states in engine.extract(batch)
            ]

    assert texts(verdict(lab, PreNorm(), lab.documents())) == []
    assert texts(verdict(lab, PreNorm(), lab.documents(norms=0))) == [
        "final is pre-norm, declared post-norm"
    ]


def test_documents_are_spread() -> None:
    assert spread(10, 3) == [0, 4, 9]
    assert spread(2, 30) == [0, 1]


def test_lab_is_what_it_says(lab: Lab, tmp_path: Path) -> None:
    """The faults are faults: a second norm changes states, layers differ."""
    once, twice = lab.documents(norms=1)[0].final, lab.documents(norms=2)[0].final
    assert not torch.allclose(once.float(), twice.float(), rtol=0.1)


def test_an_engine_without_the_last_layers_output(lab: Lab) -> None:
    """What SGLang gives: the final state after the norm, and the outputs of the layers before."""
    engine = lab.engine(torch.float32, reference_layers(LAYERS, last=False))
    assert texts(verdict(lab, engine, lab.documents())) == []
    assert texts(verdict(lab, engine, lab.documents(norms=2))) == [
        "final went through the last norm twice, declared post-norm"
    ]
    assert kinds(verdict(lab, engine, lab.documents(aux=(2, 4, 6)))) == {"layer_offset"}
