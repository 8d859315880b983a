"""`eagle3 parity`: the capture contract of any folder of hidden states, against any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.contract import ParitySettings, check_splits, longest_document, open_engine, splits
from eagle3.errors import HarnessError
from eagle3.settings import read_settings
from eagle3.verifier import VerifierSpec
from experiments.same_verifier import check_same_verifier
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
) -> None:
    """Prints what was found.

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
    for dataset in splits(data_dir).values():
        check_same_verifier(dataset, head.config, revision_of(verifier_path))
    if settings.engine is None:
        found = check_splits(data_dir, head, settings, None)
    else:
        if Path(verifier_path).is_file():
            raise HarnessError(
                "an engine needs the whole verifier", where=verifier_path,
                rule="--verifier-path: a Hugging Face folder or hub id", got="a head file",
                fix="give the verifier, or leave --engine out",
            )  # fmt: skip
        spec = VerifierSpec.open(verifier_path, trust_remote_code=trusted())
        longest = longest_document(data_dir)
        with open_engine(settings.engine, spec, settings, device, longest=longest) as opened:
            found = check_splits(data_dir, head, settings, opened)
    for name, result in found.items():
        print(f"{data_dir / name}: {result['words']}")
        print("\n".join(_lines(result)))


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
