"""`eagle3 diagnose`: the convention under which an unknown drafter was trained."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch

from eagle3.contract import splits
from eagle3.drafter_convention import Finding, investigate
from eagle3.errors import HarnessError
from eagle3.extraction.transformers import TransformersEngine
from eagle3.reference import head_norm, reference_layers
from eagle3.served_as import ServedAs, replayable, with_layers
from eagle3.unknown_drafter import open_unknown
from eagle3.verifier import VerifierSpec
from experiments.same_verifier import check_same_verifier
from experiments.verifier_argument import head_of, trusted
from stages.runner import set_logging


def run(
    *, drafter: str, data_dir: Path, verifier_path: str, documents: int, k: int, dtype: str
) -> None:
    """Prints every reading with its τ, and the verdict.

    Raises:
        HarnessError: inputs that cannot be used.
    """
    set_logging()
    if dtype not in ("bfloat16", "float32"):
        raise HarnessError(
            "--dtype cannot be used",
            where="--dtype",
            rule="bfloat16 or float32",
            got=dtype,
            fix="one of the two, or none for bfloat16",
        )
    spec = VerifierSpec.open(verifier_path, trust_remote_code=trusted())
    head = head_of(verifier_path)
    found = splits(data_dir)
    # Held-out documents first: on its own training data a drafter flatters itself.
    name = next((name for name in ("test", "dev") if name in found), next(iter(found)))
    check_same_verifier(found[name], head.config, spec.revision)
    some = replayable(found[name], documents, where=data_dir / name)
    kind = getattr(torch, dtype)
    opened, said = open_unknown(drafter, head, kind)
    layers = reference_layers(spec.num_hidden_layers)
    engine = TransformersEngine.open(spec, layers, kind, "cpu")
    claim = None if said is None else ServedAs(aux_layers=said)
    layered = with_layers(some, engine, head)
    result = investigate(opened, layered, head, head_norm(head), claim, k=k, dtype=kind)
    rows = sum(len(document.token_ids) for document in some)
    print(f"{drafter}, on {len(some)} documents ({rows} tokens) of {data_dir / name}, {k} drafts\n")
    print("\n".join(_lines(result, k)))


def _lines(result: Finding, k: int) -> list[str]:
    lines = [f"{'reading':34} {'tau':>6} {'older SGLang':>13} {'nats a draft':>13}"]
    lines += [
        f"{score.name:34} {score.tau:6.3f} {score.old_sglang_rate:13.1%} {score.loss:13.3f}"
        for score in result.scores
    ]
    told = ", ".join(f"{name} {share:.0%}" for name, share in result.targets.items())
    lines += ["", f"first drafts that are the token of targets: {told}", ""]
    for sentence in result.words:
        lines += textwrap.wrap(sentence, 96)
    lines.append(
        f"(Older SGLang prints (accepted + bonus) / (rounds x {k + 1}): "
        f"{1 / (k + 1):.0%} where nothing is accepted.)"
    )
    return lines
