"""A checkpoint as serving engines get it, loaded back and compared.

Legend: N rows, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3.checkpoint import DrafterFormat, load_drafter, save_drafter
from eagle3.drafter import DraftCache, Drafter
from eagle3.errors import HarnessError
from eagle3.formats.eagle import SWITCHES
from eagle3.seeding import generator
from eagle3.settings import Settings
from eagle3.verifier_head import VerifierHead

PROBE_ROWS = 64
# Weights rounded to bfloat16 move logits by about 2^-8 of their size a matrix product.
BF16_TOLERANCE = 0.05
ENGINE_DTYPE = torch.bfloat16


class ExportSettings(Settings):
    """`format`: eagle, which SGLang and vLLM read, or speculators, which vLLM reads."""

    format: DrafterFormat = "eagle"


def export(
    checkpoint: Path,
    out: Path,
    head: VerifierHead,
    layout: DrafterFormat = "eagle",
    *,
    source: str | None = None,
    architectures: Sequence[str] = (),
) -> float:
    """Writes the served form of a checkpoint (bfloat16) and proves that it is the same drafter.

    Args:
        source, architectures: see `eagle3.checkpoint.save_drafter`.

    Returns:
        The largest difference of any logit, relative to the largest logit, that rounding the
        weights made.

    Raises:
        HarnessError: a variant of the layer that the engine does not run, or a loaded-back export
            that answers differently.
    """
    drafter = load_drafter(checkpoint, head, torch.float32)
    switched = [name for name in SWITCHES if getattr(drafter.config, name)]
    if switched and layout == "eagle":
        raise HarnessError(
            "SGLang does not run this variant of the draft layer",
            where=checkpoint,
            rule=f"{', '.join(SWITCHES)} all false",
            got=f"{', '.join(switched)} true",
            fix="train without it to serve in SGLang, or export the format speculators for vLLM",
        )
    save_drafter(
        out, drafter, head.config, ENGINE_DTYPE, layout, source=source, architectures=architectures
    )
    back = load_drafter(out, head, torch.float32)
    for name, value in back.state_dict().items():
        stored = drafter.state_dict()[name]
        if not torch.equal(
            value, stored.to(ENGINE_DTYPE).to(value.dtype) if stored.is_floating_point() else stored
        ):
            raise HarnessError(
                "an exported tensor came back changed",
                where=f"{out}: {name}",
                rule="what was written, bit by bit",
                got=f"{value.dtype} {list(value.shape)} of other values",
                fix="export again; if it stays so, to another disk",
            )
    before, after = probe(drafter), probe(back)
    error = float((after - before).abs().max() / before.abs().max())
    if not error <= BF16_TOLERANCE:
        raise HarnessError(
            "the exported drafter answers differently",
            where=out,
            rule=f"logits within {BF16_TOLERANCE} of the largest",
            got=f"{error:.4f}",
            fix="weights that bfloat16 does not hold: train again with a lower learning rate",
        )
    return error


@torch.no_grad()
def probe(drafter: Drafter) -> Tensor:
    """Logits [N, D] of fixed random rows, with true states at first and own outputs after."""
    config = drafter.config
    draw = generator("export probe")
    tokens = torch.randint(config.vocab_size, (PROBE_ROWS,), generator=draw)
    aux = torch.randn(PROBE_ROWS, len(config.aux_layers), config.target_hidden_size, generator=draw)
    cache = DraftCache()
    dtype = drafter.fc.weight.dtype
    out = drafter.forward_cached(
        tokens, drafter.fuse(aux.to(dtype)), torch.arange(PROBE_ROWS), cache
    )
    again = drafter.forward_cached(tokens[:1], out[-1:], torch.tensor([PROBE_ROWS]), cache)
    return drafter.logits(torch.cat([out, again]))
