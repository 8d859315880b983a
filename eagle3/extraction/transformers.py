"""Hidden states by transformers: hooks on decoder layers, one forward pass a batch.

Knows nothing of files. No logits are computed for padding.

Shape suffixes: B documents of a batch, L padded length, N rows without padding, T rows of a
document, n aux layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from eagle3.extraction.base import EngineIdentity, States
from eagle3.extraction.logits import LogitSummary
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import decoder_of, load_model


class TransformersEngine:
    """Extracts from a loaded causal LM.

    Args:
        model: in eval mode, on its device; its dtype is the dtype of the states.
        decoder: the text decoder in it, with `layers` and a final norm.
        aux_layers: post-layer indices, in range.
        logit_scale: multiplies logits.
        logit_softcap: c of c·tanh(logits/c), or None.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module,
        aux_layers: Sequence[int],
        *,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        import transformers

        self.identity = EngineIdentity(
            engine="transformers", version=transformers.__version__, final_hidden="post_norm"
        )
        self._decoder = decoder
        lm_head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
        self._summarise = LogitSummary(
            lm_head, len(lm_head.weight), scale=logit_scale, softcap=logit_softcap
        )
        self._device = next(decoder.parameters()).device
        self._aux_layers = list(aux_layers)
        self._captured: dict[int, torch.Tensor] = {}
        # Padding stands right of a document. A causal layer can't look there, and without a mask
        # attention takes its fast path.
        self._needs_mask = not all(getattr(m, "is_causal", True) for m in decoder.modules())
        layers: Sequence[nn.Module] = decoder.layers  # type: ignore[assignment]
        for k in self._aux_layers:
            layers[k].register_forward_hook(self._keeper(k))

    @classmethod
    def open(
        cls, spec: VerifierSpec, aux_layers: Sequence[int], dtype: torch.dtype, device: str
    ) -> TransformersEngine:
        """Loads a verifier to extract from.

        Raises:
            HarnessError: it cannot be loaded.
        """
        model = load_model(spec, dtype, device)
        return cls(
            model,
            decoder_of(model),
            aux_layers,
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap,
        )

    def _keeper(self, k: int) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._captured[k] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.inference_mode()
    def extract(self, batch: Sequence[torch.Tensor]) -> list[States]:
        """See `StatesEngine.extract`."""
        lengths = [len(tokens) for tokens in batch]
        padded_BL = nn.utils.rnn.pad_sequence([tokens.long() for tokens in batch], batch_first=True)
        mask_BL = None
        if self._needs_mask and min(lengths) < max(lengths):
            mask_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            mask_BL = mask_BL.long().to(self._device)
        output = self._decoder(
            input_ids=padded_BL.to(self._device), attention_mask=mask_BL, use_cache=False
        )
        final_BLH = output.last_hidden_state
        final_NH = torch.cat([final_BLH[b, :length] for b, length in enumerate(lengths)])
        top1_N, lse_N = self._summarise(final_NH)
        aux_BLnH = [self._captured.pop(k) for k in self._aux_layers]
        parts = zip(
            lengths, final_NH.cpu().split(lengths), top1_N.split(lengths), lse_N.split(lengths),
            strict=True,
        )  # fmt: skip
        return [
            States(
                aux_TnH=torch.stack([aux_BLH[b, :length] for aux_BLH in aux_BLnH], 1).cpu(),
                final_TH=final_TH,
                top1_T=top1_T,
                lse_T=lse_T,
            )
            for b, (length, final_TH, top1_T, lse_T) in enumerate(parts)
        ]
