"""From states to a verifier's logits: its output matrix, then scaling and soft-capping.

The one place that says the latter; generation, extraction, targets and the reading of other
people's data all call it.

Legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eagle3.verifier_head import VerifierHead


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


def head_logits(post_NH: Tensor, head: VerifierHead) -> Tensor:
    """The verifier's logits of states after its last norm, f32[N, V]."""
    return finish_logits(
        (post_NH.to(head.lm_head.dtype) @ head.lm_head.T).float(),
        scale=head.config.logit_scale,
        softcap=head.config.logit_softcap,
    )
