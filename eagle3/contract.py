"""The capture contract: what stored states are said to be, held against data, head and an engine.

What the data and the verifier's head tell is always checked; an engine that computes the states
again tells the rest. Knows no stage and no command line.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from eagle3.dataset import Document, StatesDataset, StatesMeta
from eagle3.engines.server import ServerSettings
from eagle3.errors import HarnessError
from eagle3.extraction import backends
from eagle3.extraction.base import ExtractSettings, StatesEngine
from eagle3.final_check import check_final
from eagle3.parity import Declared
from eagle3.parity_faults import Diagnosis, diagnose, named
from eagle3.reference import BATCH_TOKENS, head_norm, measured, reference_layers, spread
from eagle3.settings import Settings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead

Engine = Literal["transformers", "sglang", "vllm"]
NOT_CHECKED = "not checked against a server"
SERVERS = ("sglang", "vllm")
# Engines that give the last layer's output after the norm only.
NORMED_LAST = ("sglang",)


class ParitySettings(Settings):
    """How stored states are checked before they are trained on.

    engine: what will serve; it computes states of every layer again. null: no engine, only what
        data and head tell.
    documents: samples of each split, evenly out of it.
    max_tokens: of a sample, from its start.
    dtype: in which the engine computes.
    server: where a serving engine's servers are.
    """

    engine: Engine | None = None
    documents: int = Field(default=24, ge=1)
    max_tokens: int = Field(default=256, ge=8)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    server: ServerSettings = Field(default_factory=ServerSettings)


class Stored(Protocol):
    """Stored states of one verifier: our own shards, or another program's folder read in place."""

    @property
    def folder(self) -> Path: ...
    @property
    def meta(self) -> StatesMeta: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Document: ...


def splits(folder: Path) -> dict[str, StatesDataset]:
    """The datasets of a folder by name: its subfolders, or itself under the name of none.

    Raises:
        HarnessError: there is none.
    """
    if (folder / "meta.json").is_file():
        return {"": StatesDataset.open(folder)}
    found = {path.parent.name: path.parent for path in sorted(folder.glob("*/meta.json"))}
    if not found:
        raise HarnessError(
            "no hidden states", where=folder, rule="a data set folder, or one with train/, dev/",
            got=", ".join(sorted(path.name for path in folder.glob("*"))[:5]) or "nothing",
            fix="correct the path, or run the extract stage; eagle3 import writes another "
            "program's states so",
        )  # fmt: skip
    return {name: StatesDataset.open(path) for name, path in found.items()}


@contextlib.contextmanager
def open_engine(
    engine: Engine, spec: VerifierSpec, settings: ParitySettings, device: str, *, longest: int
) -> Iterator[StatesEngine]:
    """The engine with the verifier in it, opened for every layer.

    Args:
        longest: tokens of the longest document that it may be asked for.
    """
    layers = reference_layers(spec.num_hidden_layers, last=engine not in NORMED_LAST)
    extraction = ExtractSettings(
        backend=engine, dtype=settings.dtype, batch_tokens=BATCH_TOKENS, server=settings.server
    )
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as work,
        backends.open_engine(
            extraction, spec, layers, device=device, longest=longest, work=Path(work)
        ) as opened,
    ):
        yield opened


def longest_document(folder: Path) -> int:
    """Tokens of the longest document in any split of a folder."""
    return max(max(dataset.lengths) for dataset in splits(folder).values())


def check_splits(
    folder: Path,
    head: VerifierHead,
    settings: ParitySettings,
    engine: StatesEngine | None,
    *,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What was found out about every split of a folder, as plain values.

    Args:
        engine: opened by `open_engine` for the same verifier; None checks data and head alone.
        names: splits to check; None: all.

    Raises:
        HarnessError: states that are not what they are said to be, with every fault in words; or
            states of another verifier.
    """
    chosen = {n: found for n, found in splits(folder).items() if names is None or n in names}
    for dataset in chosen.values():
        dataset.check(head.config)
    return {name: check_states(found, head, settings, engine) for name, found in chosen.items()}


def words(result: Mapping[str, Any], made_by: str) -> str:
    """The verdict on one split in one sentence.

    Args:
        result: one split of `check_splits`.
        made_by: the engine that the stored states came from.
    """
    compared = result["engine"]
    alone = "the final state predicts the next tokens as declared"
    if compared is None:
        return f"{NOT_CHECKED}; {alone}"
    said = (
        f"equal to {compared['name']} {compared['version']} within "
        f"{compared['largest_error']:.1%} on {compared['documents']} samples"
    )
    if compared["name"] not in SERVERS:
        same = ", which made them" if compared["name"] == made_by else ""
        return f"{NOT_CHECKED}; {said}{same}"
    return said


def check_states(
    dataset: Stored, head: VerifierHead, settings: ParitySettings, engine: StatesEngine | None
) -> dict[str, Any]:
    """One split of `check_splits`, of states that are known to be this verifier's."""
    documents = [dataset[i] for i in spread(len(dataset), settings.documents)]
    meta = dataset.meta
    declared = Declared(
        aux_layers=tuple(meta.aux_layers),
        final_hidden=meta.final_hidden,
        num_hidden_layers=head.config.num_hidden_layers,
        codec=meta.codec,
    )
    compared: dict[str, Any] | None = None
    faults: list[str] = []
    final = check_final(documents, head, head_norm(head), meta.final_hidden)
    normed_last = engine is not None and engine.identity.engine in NORMED_LAST
    if normed_last and final is not None and final.faults:
        # By value such an engine cannot tell it, and would call it something else.
        raise mismatch(dataset, final.faults, engine)
    if normed_last and (
        meta.final_hidden == "pre_norm" or declared.num_hidden_layers - 1 in meta.aux_layers
    ):
        raise HarnessError(
            "states before the last norm cannot be compared with this engine",
            where=dataset.folder,
            rule="final states after the norm, and aux states of earlier layers than the last",
            got=f"final {meta.final_hidden}, aux layers {list(meta.aux_layers)}",
            fix="compare with vllm or transformers, or extract with the engine that will serve",
        )
    if engine is not None:
        found = diagnose(
            list(measured(documents, engine, head, declared, max_tokens=settings.max_tokens)),
            declared,
        )
        faults = [fault.text for fault in found.faults]
        compared = {
            "name": engine.identity.engine,
            "version": engine.identity.version,
            **plain(found),
        }
    if final is not None and not faults:
        faults = final.faults
    if faults:
        raise mismatch(dataset, faults, engine)
    result: dict[str, Any] = {
        "made_by": f"{meta.engine} {meta.engine_version}",
        "aux_layers": meta.aux_layers,
        "final_hidden": meta.final_hidden,
        "documents": len(documents),
        "final": None if final is None else asdict(final),
        "engine": compared,
    }
    return {"words": words(result, meta.engine), **result}


def plain(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis as plain values, errors rounded to what repeats."""
    return {
        "documents": found.documents,
        "rows": found.rows,
        "largest_error": _rounded(found.largest_error),
        "states": [
            {
                "name": slot.name,
                "declared": named(slot.declared),
                "found": named(slot.found),
                "error": _rounded(slot.error),
                "tolerance": _rounded(slot.tolerance),
                "noise": _rounded(slot.noise),
                "next_reading": _rounded(slot.separation),
            }
            for slot in found.slots
        ],
    }


def mismatch(dataset: Stored, faults: list[str], engine: StatesEngine | None) -> HarnessError:
    """The error that stops the pipeline."""
    meta = dataset.meta
    own = (dataset.folder / "meta.json").is_file()
    said = "correct meta.json" if own else "correct --aux-layers or --final-hidden"
    against = "" if engine is None else f", against {engine.identity.engine}"
    return HarnessError(
        "hidden states are not what they are declared to be",
        where=f"{dataset.folder} (from {meta.engine} {meta.engine_version}){against}",
        rule=f"aux layers {', '.join(map(str, meta.aux_layers))} in this order, final "
        f"{meta.final_hidden.replace('_', '-')}, row t at token t",
        got="\n       ".join(faults),
        fix=f"extract again, or {said} where it alone is wrong; then serve what is "
        "declared: a drafter served with other states than it learnt accepts next to nothing",
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
