"""Tensors of a published drafter: where they lie, what they are called, what is left out.

Knows names, embeddings and vocabularies; configs are `eagle3.formats.published`' matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eagle3.draft_map import read_map
from eagle3.drafter import DrafterConfig
from eagle3.errors import HarnessError
from eagle3.pickles import load_pickled
from eagle3.reading import open_tensors, read_index
from eagle3.verifier_head import VerifierHead

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NOT_READ = ("verifier_lm_head.weight", "verifier_norm.weight")
MAPS = ("d2t", "t2d")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Our prefix -> that of the package speculators. The rest carries the same names.
PREFIXES = {"midlayer.": "layers.0.", "aux_norm.": "input_norm."}
WHOLE = "download or save the drafter again, whole"


def weight_files(folder: Path) -> list[Path]:
    """The files of a drafter's weights.

    Raises:
        HarnessError: there are none, or the index of several cannot be used.
    """
    for whole, index in zip(WEIGHTS, INDICES, strict=True):
        if (folder / index).is_file():
            return [
                folder / name
                for name in sorted(set(read_index(folder / index, fix=WHOLE).values()))
            ]
        if (folder / whole).is_file():
            return [folder / whole]
    raise HarnessError(
        "not a drafter checkpoint: a file is missing",
        where=folder,
        rule=f"config.json and {' or '.join((*WEIGHTS, *INDICES))}",
        got=", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing",
        fix=WHOLE,
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors under the names that they are stored by."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            with open_tensors(path, fix=WHOLE) as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            stored = load_pickled(path)
            found |= {name: t for name, t in stored.items() if isinstance(t, Tensor)}
    return found


def own_names(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The same tensors under our names, those of the verifier left out.

    Raises:
        HarnessError: two of them have one name then.
    """
    renamed: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix("model.")
        if name in NOT_READ or name.endswith("rotary_emb.inv_freq"):
            continue
        for ours, theirs in PREFIXES.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if name in renamed:
            raise HarnessError(
                "two stored tensors are one and the same of the drafter", where=folder,
                rule=f"one {name}, under one of its names", got=f"{stored} is a second one",
                fix=WHOLE,
            )  # fmt: skip
        renamed[name] = tensor
    return renamed


def refuse_quantised(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises for weights that are no plain floats: their scales would be left out."""
    for name, tensor in tensors.items():
        if name not in MAPS and tensor.dtype not in FLOATS:
            raise HarnessError(
                "the drafter's weights are not stored as plain floats", where=f"{folder}: {name}",
                rule=", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS),
                got=str(tensor.dtype).removeprefix("torch."),
                fix="a checkpoint of it that is not quantised",
            )  # fmt: skip


def about_embedding(embed: Tensor, head: VerifierHead, folder: Path) -> str:
    """What to say of a drafter's own embedding: tokens are read through the verifier's.

    Raises:
        HarnessError: it has another shape than the verifier's.
    """
    if embed.shape != head.embed.shape:
        raise HarnessError(
            "the drafter's embedding is not of this verifier",
            where=f"{folder}: {EMBEDDING}", rule=list(head.embed.shape), got=list(embed.shape),
            fix="start from scratch, or from a drafter for this verifier or one like it",
        )  # fmt: skip
    theirs = head.embed.float() * head.config.embed_scale
    bound = theirs.abs().amax(1) * 2.0**-7  # rounding to bfloat16 on either side
    differing = int(((embed.float() - theirs).abs().amax(1) > bound).sum())
    if not differing:
        return "its embedding is the verifier's"
    return (
        f"its embedding differs from the verifier's in {differing} of {len(embed)} rows; the "
        "verifier's is used instead"
    )


def fill_vocabulary(
    own: dict[str, Tensor], config: DrafterConfig, head: VerifierHead, folder: Path
) -> list[str]:
    """Puts d2t (offsets), t2d and the head in where a checkpoint leaves them out.

    Returns:
        What was filled in or turned round, for the log.

    Raises:
        HarnessError: nothing says which tokens a part of the vocabulary is of, d2t is of another
            size, or as `read_map`.
    """
    notes = []
    drafts, size = config.draft_vocab_size, config.vocab_size
    if "d2t" not in own:
        if drafts != size:
            raise HarnessError(
                "the drafter has a draft vocabulary but does not say which tokens it is of",
                where=folder, rule=f"d2t for its {drafts} of {size} tokens", got="no d2t",
                fix="add d2t (and t2d) to its weights",
            )  # fmt: skip
        notes.append(f"full vocabulary of {size} tokens: no d2t")
        own["d2t"] = torch.zeros(size, dtype=torch.int64)
    if own["d2t"].numel() != drafts:
        raise HarnessError(
            "tensor d2t does not fit the config", where=folder, rule=[drafts],
            got=list(own["d2t"].shape), fix=WHOLE,
        )  # fmt: skip
    own["d2t"], were_ids = read_map(own["d2t"], own.get("t2d"), size, where=f"{folder}: d2t")
    if were_ids:
        notes.append("d2t holds token ids, not offsets: turned into offsets")
    elif "t2d" not in own and drafts != size:
        notes.append("no t2d: d2t is read as offsets, as engines read it")
    targets = own["d2t"] + torch.arange(drafts)
    own["t2d"] = torch.zeros(size, dtype=torch.bool)
    own["t2d"][targets] = True
    if HEAD not in own:
        notes.append("no lm_head of its own: starts from the verifier's rows")
        own[HEAD] = head.lm_head[targets] * head.config.logit_scale
    return notes
