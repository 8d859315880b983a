"""What a verifier does to its logits after the output matrix: scaling and soft-capping.

The one place that says so; generation, extraction, targets and the reading of other people's data
all call it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def finish_logits(logits: Tensor, *, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Logits as the verifier samples from them: c·tanh(scale·x / c).

    Args:
        logits: any shape, what the output matrix gives.
        scale: Cohere's and Granite's; 1.0 for most.
        softcap: c, Gemma's; None for most.

    Returns:
        The same tensor where there is nothing to do.
    """
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits
