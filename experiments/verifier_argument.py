"""What a command is given as `--verifier-path`: a verifier, or a head file that was made of one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from eagle3.errors import HarnessError
from eagle3.verifier import HeadConfig, VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from experiments.project import project_root
from stages.params import read_section
from stages.runner import RunSettings


def verifier_of(path: str) -> HeadConfig:
    """What it says of itself."""
    if Path(path).is_file():
        return read_head(Path(path)).config
    return VerifierSpec.open(path)


def has_layer(path: str) -> bool:
    """Whether its last layer is one that a draft layer can start from. Opens no shard."""
    if Path(path).is_file():
        return read_head(Path(path)).layer is not None
    return VerifierSpec.open(path).keys.layer is not None


def head_of(path: str, work: Path | None = None, *, layer: bool = False) -> VerifierHead:
    """The head.

    Args:
        layer: with the last decoder layer, whose shard is opened for it.
        work: folder in which `head.safetensors` stays for others to read; None: nothing stays.
    """
    if work is None:
        with tempfile.TemporaryDirectory() as folder:
            return head_of(path, Path(folder), layer=layer)  # stays mapped when its name is gone
    file = work / "head.safetensors"
    if Path(path).is_file():
        file.unlink(missing_ok=True)
        file.symlink_to(Path(path).resolve())
    else:
        write_head(VerifierSpec.open(path), file, layer=layer)
    return read_head(file)


def revision_of(path: str) -> str | None:
    """Of its weights; None for a head file, which does not tell."""
    return None if Path(path).is_file() else VerifierSpec.open(path).revision


def trusted() -> bool:
    """Whether the project's settings let a verifier's own code run; outside of a project, no."""
    try:
        path = project_root() / "params.yaml"
    except HarnessError:
        return False
    return read_section(path, RunSettings, "run").trust_remote_code
