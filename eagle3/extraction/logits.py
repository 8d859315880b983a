"""What is kept of a verifier's logits: their argmax and log-sum-exp over the full vocabulary.

The logits of a whole batch never exist at once. Knows no engine.

Shape suffixes: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F

from eagle3.logits import finish_logits
from eagle3.verifier import VerifierSpec

# Logits in fp32 at one time: by the matrix product, and by the sums over them. On the CPU the first
# is small enough for the allocator to use the same memory again (fresh pages would cost more than
# the arithmetic), the second stays in a core's own cache.
_PRODUCT_BYTES, _SUM_BYTES = 24 << 20, 2 << 20
_ACCELERATOR_BYTES = 1 << 30


class LogitSummary:
    """Argmax and log-sum-exp of the logits of final states.

    Args:
        project: [N, H] to [N, V], the verifier's output matrix.
        vocab_size: V.
        scale: multiplies logits.
        softcap: c of c·tanh(logits/c), or None.
    """

    def __init__(
        self,
        project: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self._project, self._vocab_size = project, vocab_size
        self._scale, self._softcap = scale, softcap

    @torch.inference_mode()
    def __call__(self, final_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Argmax i32[N] and log-sum-exp f32[N] for normed states, on the CPU."""
        row_bytes = 4 * self._vocab_size
        on_cpu = final_NH.device.type == "cpu"
        product_rows = max(1, (_PRODUCT_BYTES if on_cpu else _ACCELERATOR_BYTES) // row_bytes)
        sum_rows = max(1, _SUM_BYTES // row_bytes) if on_cpu else product_rows
        top1s, lses = [], []
        for chunk_NH in final_NH.split(product_rows):
            logits_NV = finish_logits(
                self._project(chunk_NH), scale=self._scale, softcap=self._softcap
            )
            for part_NV in logits_NV.split(sum_rows):
                wide_NV = part_NV.float()
                best_N, top1_N = wide_NV.max(-1)
                lses.append(wide_NV.sub_(best_N[:, None]).exp_().sum(-1).log_().add_(best_N))
                top1s.append(top1_N)
        return torch.cat(top1s).int().cpu(), torch.cat(lses).cpu()


class VerifierOutput:
    """The last norm and the output matrix of a verifier, for states that an engine delivered.

    Opens these two weights and none of the rest.
    """

    def __init__(self, norm_H: torch.Tensor, eps: float, summary: LogitSummary) -> None:
        self._norm_H, self._eps = norm_H, eps
        self.summarise = summary

    @classmethod
    def open(cls, spec: VerifierSpec, dtype: torch.dtype, device: str | torch.device) -> Self:
        """Reads both from a verifier's weight files.

        Raises:
            HarnessError: a weight is missing or ambiguous.
        """
        keys = spec.keys
        output = keys.lm_head or keys.embed
        stored = spec.tensors([keys.norm, output])
        lm_head_VH = stored[output].to(device, dtype)
        norm_H = (stored[keys.norm].float() + spec.norm_offset).to(device, dtype)
        summary = LogitSummary(
            lambda final_NH: F.linear(final_NH, lm_head_VH),
            spec.vocab_size,
            scale=spec.logit_scale,
            softcap=spec.logit_softcap,
        )
        return cls(norm_H, spec.rms_norm_eps, summary)

    @torch.inference_mode()
    def normed(self, final_NH: torch.Tensor) -> torch.Tensor:
        """The last norm (RMS) of states before it."""
        wide_NH = F.rms_norm(
            final_NH.to(self._norm_H.device).float(), self._norm_H.shape, None, self._eps
        )
        return wide_NH.to(self._norm_H.dtype) * self._norm_H
