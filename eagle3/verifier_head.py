"""The part of a verifier that training uses: embedding, last norm, output matrix, last layer.

One small file that is written once; training never opens the verifier. Knows nothing of drafters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.errors import HarnessError
from eagle3.reading import open_tensors
from eagle3.settings import read_settings
from eagle3.shardfile import write_tensors
from eagle3.verifier import HeadConfig, VerifierSpec

CHECKED_ROWS = 4096


@dataclass(frozen=True)
class VerifierHead:
    """The part of a verifier that training uses.

    Attributes:
        embed: [V, H], not scaled by `config.embed_scale`.
        norm: [H], without `config.norm_offset`.
        lm_head: [V, H].
        layer: weights of the last decoder layer by Hugging Face Llama name
            (`self_attn.q_proj.weight`, ...), None for verifiers whose layers are not Llama-like.
    """

    config: HeadConfig
    embed: Tensor
    norm: Tensor
    lm_head: Tensor
    layer: dict[str, Tensor] | None

    @property
    def norm_weight(self) -> Tensor:
        """What the last norm multiplies with: the family's offset added, f32[H]."""
        return self.norm.float() + self.config.norm_offset


def write_head(spec: VerifierSpec, path: Path, *, layer: bool = True) -> None:
    """Writes embed, norm, lm_head and the last Llama-like layer in the verifier's dtype.

    Weights are mapped and copied from file to file, so that only quantised ones are ever in memory
    as a whole.

    Args:
        layer: with the last layer; False leaves the shards that hold it closed.

    Raises:
        HarnessError: a weight is missing, ambiguous, or of a shape that the configuration denies.
    """
    keys = spec.keys
    names = {f"layer.{name}": key for name, key in (keys.layer or {}).items()} if layer else {}
    # A copy where the output is tied: every reader finds all three.
    names |= {"embed": keys.embed, "norm": keys.norm, "lm_head": keys.lm_head or keys.embed}
    stored = spec.tensors(sorted(set(names.values())))
    head = {name: stored[key] for name, key in names.items()}
    rows, hidden = spec.vocab_size, spec.hidden_size
    for role, shape in (("embed", [rows, hidden]), ("norm", [hidden]), ("lm_head", [rows, hidden])):
        if list(head[role].shape) != shape:
            raise HarnessError(
                f"the verifier's {role} weight does not fit its configuration",
                where=f"{spec.source}: {names[role]}",
                rule=f"shape {shape}",
                got=list(head[role].shape),
                fix="download or save the verifier again: weights and config.json of one model",
            )
    for role in ("embed", "norm", "lm_head"):
        # In parts: what is looked at is never in memory as a whole. The extremes tell of a NaN too,
        # in a fortieth of the time that isfinite takes over a matrix of gigabytes.
        ends = [torch.stack(part.aminmax()) for part in head[role].split(CHECKED_ROWS)]
        if not bool(torch.stack(ends).isfinite().all()):
            raise HarnessError(
                f"the verifier's {role} weight holds a NaN or infinity",
                where=f"{spec.source}: {names[role]}",
                rule="finite numbers",
                got=f"others, in {head[role].dtype}",
                fix="download the verifier again, whole; a quantised one: look at its scales",
            )
    pairs = zip(head["embed"].split(CHECKED_ROWS), head["lm_head"].split(CHECKED_ROWS), strict=True)
    if spec.tied and keys.lm_head and not all(torch.equal(one, other) for one, other in pairs):
        raise HarnessError(
            "the verifier's configuration ties its output to the embedding, and its weights hold "
            "another output matrix: engines take the embedding",
            where=f"{spec.source}: {names['lm_head']}",
            rule="tie_word_embeddings: false in config.json, or weights without this matrix",
            got="tie_word_embeddings: true, and rows that differ",
            fix="correct the key if the matrix was trained, or take the matrix out",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    order = sorted(head, key=lambda name: (-head[name].itemsize, name))
    metadata = {"config": spec.head_config.model_dump_json()}
    write_tensors(path, {name: [head[name]] for name in order}, metadata)
    path.chmod(0o644)


def read_head(path: Path) -> VerifierHead:
    """Opens a head file, memory-mapped.

    Raises:
        HarnessError: no such file, or not a head file.
    """
    if not path.is_file():
        raise HarnessError(
            "the verifier head is missing",
            where=path,
            rule="the file that the verifier stage writes",
            fix="run the verifier stage",
        )
    with open_tensors(path, fix="run the verifier stage again") as file:
        metadata = file.metadata() or {}
        if "config" not in metadata:
            raise HarnessError(
                "not a verifier head file", where=path, rule="metadata key config",
                fix="give the file that the verifier stage wrote, or the verifier's folder",
            )  # fmt: skip
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = read_settings(HeadConfig, json.loads(metadata["config"]), where=str(path))
    layer = {
        name.removeprefix("layer."): tensor
        for name, tensor in tensors.items()
        if name.startswith("layer.")
    }
    return VerifierHead(
        config, tensors["embed"], tensors["norm"], tensors["lm_head"], layer or None
    )
