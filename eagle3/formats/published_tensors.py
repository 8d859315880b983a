"""Tensors of a published drafter: where they lie, what they are called, what is left out.

Knows names, embeddings and vocabularies; configs are `eagle3.formats.published`' matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eagle3.drafter import DrafterConfig
from eagle3.errors import HarnessError
from eagle3.pickles import load_pickled
from eagle3.reading import open_tensors, read_object
from eagle3.verifier_head import VerifierHead

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
NOT_READ = ("verifier_lm_head.weight", "verifier_norm.weight")
WHOLE = "download or save the drafter again, whole"


def weight_files(folder: Path) -> list[Path]:
    """The files of a drafter's weights.

    Raises:
        HarnessError: there are none.
    """
    if (folder / INDEX).is_file():
        names = read_object(folder / INDEX, fix=WHOLE).get("weight_map") or {}
        return [folder / name for name in sorted(set(names.values()))]
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
    raise HarnessError(
        "not a drafter checkpoint: a file is missing",
        where=folder,
        rule=f"config.json and {' or '.join((*WEIGHTS, INDEX))}",
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


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names, those of the verifier left out."""
    renamed = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix("model.")
        if name in NOT_READ or name.endswith("rotary_emb.inv_freq"):
            continue
        for theirs, ours in (("layers.0.", "midlayer."), ("input_norm.", "aux_norm.")):
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        renamed[name] = tensor
    return renamed


def about_embedding(embed: Tensor | None, head: VerifierHead, folder: Path) -> str:
    """What to say of a drafter's own embedding: training reads tokens through the verifier's.

    Raises:
        HarnessError: it has another shape than the verifier's.
    """
    if embed is None:
        return "no embedding of its own: the verifier's is used"
    if embed.shape != head.embed.shape:
        raise HarnessError(
            "the drafter's embedding is not of this verifier",
            where=f"{folder}: {EMBEDDING}", rule=list(head.embed.shape), got=list(embed.shape),
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
        HarnessError: nothing says which tokens a part of the vocabulary is of, or d2t and t2d
            disagree. Sizes and ranges are left to whoever fills a drafter.
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
    own["d2t"] = own["d2t"].long().reshape(-1)
    ids = torch.arange(len(own["d2t"]))
    if "t2d" in own and len(ids) == drafts:
        kept = own["t2d"].bool().reshape(-1).nonzero()[:, 0]
        if not torch.equal((own["d2t"] + ids).sort().values, kept):
            if torch.equal(own["d2t"].sort().values, kept):
                notes.append("d2t holds token ids, not offsets: turned into offsets")
                own["d2t"] = own["d2t"] - ids
            elif _in_range(own["d2t"] + ids, size):
                raise HarnessError(
                    "the drafter's d2t and t2d disagree", where=folder,
                    rule=f"d2t for the {len(kept)} tokens of t2d, as offsets or as token ids",
                    got=f"{len(ids)} tokens, {int(_in(own['d2t'] + ids, kept))} of them in t2d",
                )  # fmt: skip
    targets = own["d2t"] + ids
    if _in_range(targets, size):
        own["t2d"] = torch.zeros(size, dtype=torch.bool)
        own["t2d"][targets] = True
        if HEAD not in own:
            notes.append("no lm_head of its own: starts from the verifier's rows")
            own[HEAD] = head.lm_head[targets] * head.config.logit_scale
    return notes


def _in_range(targets: Tensor, size: int) -> bool:
    return bool(len(targets)) and int(targets.min()) >= 0 and int(targets.max()) < size


def _in(targets: Tensor, kept: Tensor) -> int:
    return int(torch.isin(targets, kept).sum())
