"""What a result that DVC does not know says of its own origin, so that it leads back.

Results that are committed by hand (`reports/*.json`) have it in them, under `KEY`; a drafter of
`eagle3 train` in a file beside its weights; as a stage's record is in provenance/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages import provenance
from stages.closure import code_digests

KEY = "provenance"


def evidence(
    about: Mapping[str, Any],
    *,
    inputs: Mapping[str, str],
    settings: Mapping[str, Any],
    code: Mapping[str, str],
    runs: Sequence[Mapping[str, str | None]] = (),
) -> dict[str, Any]:
    """The record.

    Args:
        about: as `stages.provenance.describe` gives it.
        inputs: digests of what was read, by path; DVC's own of what DVC made.
        settings: by section of params.yaml, or the command's arguments; of a training its own.
        code: digests of the files that the result comes from, by path.
        runs: `name` and `run_id` of each MLflow run; None where the store did not answer.
    """
    return {
        "written": provenance.moment(time.time()),
        **{name: value for name, value in about.items() if name != "diff"},
        "torch": provenance.torch_build(),
        "inputs": dict(inputs),
        "settings": dict(settings),
        "code": dict(code),
        "mlflow_runs": [dict(run) for run in runs],
    }


def of_benchmark(program: str, arguments: argparse.Namespace, *, threads: int) -> dict[str, Any]:
    """The record of a benchmark, which has no run in MLflow.

    Args:
        program: its file, `__file__`.
        arguments: of its command line; the paths among them are what it read.
    """
    file = Path(program).resolve()
    root = file.parents[2]
    module = ".".join(file.relative_to(root).with_suffix("").parts)
    given = {name: _plain(value) for name, value in vars(arguments).items()}
    named: list[object] = []
    for value in given.values():
        named += value if isinstance(value, list) else [value]
    return evidence(
        provenance.describe(root, threads=threads, seed=None),
        inputs=provenance.input_digests(root, named),
        settings={"arguments": given},
        code=code_digests(root, module),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
