"""A drafter of unknown origin, opened for a verifier: its config's layers are a claim, or missing.

Knows nothing of how the claim is tested.
"""

from __future__ import annotations

import torch

from eagle3.checkpoint import embedding, fill
from eagle3.drafter import Drafter
from eagle3.extraction.base import default_layers
from eagle3.formats.published import layers_said, read_config, read_published, resolve_drafter
from eagle3.verifier_head import VerifierHead


def open_unknown(
    source: str, head: VerifierHead, dtype: torch.dtype
) -> tuple[Drafter, tuple[int, ...] | None]:
    """The drafter in eval mode, and the post-layer indices that its config names, if any.

    Where none are named, the drafter's own config holds placeholders of the right number.

    Raises:
        HarnessError: not a drafter that runs here, or one of another verifier.
    """
    folder = resolve_drafter(source)
    where = folder / "config.json"
    said = layers_said(read_config(folder), head.config.model_type, where=where)
    layers = default_layers(head.config.num_hidden_layers) if said is None else said
    published = read_published(folder, head, aux_layers=layers)
    drafter = Drafter(published.config, embedding(head, dtype))
    fill(drafter, published.tensors, where=folder)
    drafter = drafter.to(dtype).eval().requires_grad_(False)
    return drafter, None if said is None else tuple(said)
