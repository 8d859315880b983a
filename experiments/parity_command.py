"""`eagle3 parity`: the capture contract of any folder of hidden states, against any engine.

Another program's folder is read where it lies, and of it no more than the samples that are checked
and those that tell its conventions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.contract import ParitySettings, check_states, open_engine, splits
from eagle3.conventions import Conventions
from eagle3.errors import HarnessError
from eagle3.formats.foreign_states import open_foreign
from eagle3.settings import read_settings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead
from experiments.same_verifier import check_same_verifier
from experiments.training_data import States, open_foreign_states, refuse_conventions
from experiments.verifier_argument import head_of, revision_of, trusted
from stages.runner import check_device, set_logging


def run(
    *,
    data_dir: Path,
    verifier_path: str,
    engine: str | None,
    documents: int,
    max_tokens: int,
    dtype: str,
    device: str,
    conventions: Conventions,
) -> None:
    """Prints what was found.

    Args:
        conventions: of another program's folder, as for training on it in place.

    Raises:
        HarnessError: a mismatch, with every fault in words; or inputs that cannot be used.
    """
    set_logging()
    settings = read_settings(
        ParitySettings,
        {"engine": engine, "documents": documents, "max_tokens": max_tokens, "dtype": dtype},
        where="flags",
    )
    check_device(device, "--device")
    head = head_of(verifier_path)
    sets = _opened(data_dir, verifier_path, head, conventions, settings.documents, device)
    if settings.engine is None:
        found = {name: check_states(one, head, settings, None) for name, one in sets.items()}
    else:
        if Path(verifier_path).is_file():
            raise HarnessError(
                "an engine needs the whole verifier", where=verifier_path,
                rule="--verifier-path: a Hugging Face folder or hub id", got="a head file",
                fix="give the verifier, or leave --engine out",
            )  # fmt: skip
        spec = VerifierSpec.open(verifier_path, trust_remote_code=trusted())
        longest = max(max(one.lengths) for one in sets.values())
        with open_engine(settings.engine, spec, settings, device, longest=longest) as opened:
            found = {name: check_states(one, head, settings, opened) for name, one in sets.items()}
    for name, result in found.items():
        print(f"{data_dir / name}: {result['words']}")
        print("\n".join(_lines(result)))


def _opened(
    data_dir: Path,
    verifier_path: str,
    head: VerifierHead,
    said: Conventions,
    documents: int,
    device: str,
) -> dict[str, States]:
    """States to check by split, under the name of none for a folder without splits."""
    folder = open_foreign(data_dir)
    if folder is None:
        own = splits(data_dir)
        refuse_conventions(data_dir, said)
        for dataset in own.values():
            check_same_verifier(dataset, head.config, revision_of(verifier_path))
        return dict(own)
    states = open_foreign_states(
        folder, verifier_path, head, said, device=device, trust=trusted(), most=documents
    )
    return {"": states}


def _lines(result: dict[str, Any]) -> list[str]:
    lines = []
    if result["final"] is not None:
        final = result["final"]
        told = ", ".join(
            f"read as {name.replace('_', '-')} {share:.1%}"
            for name, share in final["accuracies"].items()
        )
        lines.append(f"  next token right, of {final['rows']} rows: {told}")
    for state in (result["engine"] or {}).get("states", []):
        lines.append(
            f"  {state['name']:8} {state['found']:44} error {state['error']:.2%}, "
            f"noise {state['noise']:.2%}, next reading {state['next_reading']:.0%}"
        )
    return lines
