"""`eagle3 import`: another program's hidden states as the pipeline's own shards.

After that nothing has to be said of them any more, and every tool reads them. Training in place
needs no import. The pipeline's own states can be written again in another codec.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from eagle3.codec import STORED
from eagle3.contract import splits
from eagle3.conventions import Conventions
from eagle3.errors import HarnessError
from eagle3.formats.foreign_states import open_foreign
from eagle3.shard_writer import ShardWriter
from eagle3.workspace import publish, work_folder
from experiments.output_folder import check_output
from experiments.project import project_root
from experiments.training_checks import FOREIGN, unknown_states
from experiments.training_data import (
    States,
    check_states,
    input_digests,
    open_foreign_states,
    split,
)
from experiments.verifier_argument import head_of, verifier_of
from stages.params import read_section
from stages.runner import RunSettings, check_device, set_logging, set_threads

log = logging.getLogger(__name__)

SHARD_BYTES = 2 << 30


def run(
    *,
    verifier_path: str,
    data_dir: Path,
    output_dir: Path,
    val_ratio: float,
    conventions: Conventions,
    codec: str = "none",
) -> None:
    """Writes `train/`, and `dev/` where a share is held out, under `output_dir`.

    Args:
        codec: of the shards. With another one than none `data_dir` may be the pipeline's own; its
            splits stay what they are.

    Killed and called again with the same arguments, it goes on at the last finished shard.

    Raises:
        HarnessError: no folder of a known format, something that has to be said of it, no such
            codec, or `output_dir` is there already.
    """
    root = project_root()
    set_logging()
    runs = read_section(root / "params.yaml", RunSettings, "run")
    set_threads(runs.threads)
    check_device(runs.device)
    if codec not in STORED:
        raise HarnessError(
            "no such codec", where="--codec", rule=" or ".join(STORED), got=codec,
            fix="one of these, or leave it out for none",
        )  # fmt: skip
    folder = open_foreign(data_dir)
    if folder is None and codec == "none":
        raise unknown_states(data_dir, FOREIGN)
    check_output(output_dir, "--output-dir", ())
    verifier = verifier_of(verifier_path)
    if folder is None:
        check_states(data_dir, verifier, conventions)
    key = {
        "inputs": input_digests(verifier, data_dir, None, folder),
        "said": conventions.model_dump(),
        "val_ratio": val_ratio,
        "codec": codec,
        "output": str(output_dir.resolve()),
    }
    with work_folder(root, "import", key, output=output_dir.resolve()) as work:
        try:
            sets: dict[str, States]
            if folder is None:
                sets = dict(splits(data_dir))
            else:
                head = head_of(verifier_path, work)
                states = open_foreign_states(
                    folder, verifier_path, head, conventions,
                    device=runs.device, trust=runs.trust_remote_code,
                )  # fmt: skip
                sets = {"": states}
            for name, one, chosen in _parts(sets, val_ratio):
                _write(one, chosen, work / "states" / name, name, codec)
            publish(work / "states", output_dir.resolve())
        finally:
            for file in work.glob("head.safetensors*"):
                file.unlink()
    log.info("hidden states: %s", output_dir)


def _parts(sets: dict[str, States], val_ratio: float) -> Iterator[tuple[str, States, list[int]]]:
    """Name, states and samples of every folder to write."""
    for name, states in sets.items():
        if name:
            yield name, states, list(range(len(states)))
            continue
        for part, chosen in zip(("train", "dev"), split(states, val_ratio), strict=True):
            if chosen:
                yield part, states, chosen


def _write(states: States, chosen: list[int], folder: Path, name: str, codec: str) -> None:
    kind = {"codec": codec, "rows": 0, "documents": 0, "supervised": 0}
    writer = ShardWriter(folder, states.meta.model_copy(update=kind), SHARD_BYTES)
    done = writer.done
    for index in tqdm(chosen, desc=name, unit="sample"):
        if states.ids[index] not in done:
            writer.add(states[index])
    meta = writer.finish()
    log.info("%s: %d samples, %d tokens, %d supervised", name, meta.documents, meta.rows,
             meta.supervised)  # fmt: skip
