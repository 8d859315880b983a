"""The verifier as decoding needs it: appends rows to a cache, gives logits and aux states, crops.

Wraps a transformers causal LM. Knows nothing of drafters or of how tokens are chosen.

Shape suffixes: N new rows, M rows with logits asked for, V vocabulary, n aux layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.cached_attention import GROUPED, BufferLayer, buffer_cache, register
from eagle3.decode import Rows
from eagle3.errors import HarnessError
from eagle3.verifier_model import cache_argument, decoder_of


def check_aux_layers(aux_layers: Sequence[int], num_hidden_layers: int) -> None:
    """Refuses a drafter's layers that the verifier does not have.

    Raises:
        HarnessError: with both.
    """
    if max(aux_layers) >= num_hidden_layers:
        raise HarnessError(
            "aux states of a layer that the verifier does not have",
            where="aux_layers of the drafter",
            rule=f"below {num_hidden_layers}",
            got=list(aux_layers),
            fix="a drafter for this verifier, or the verifier of this drafter",
        )


class CachedVerifier:
    """One sequence's verifier: `forward` appends tokens, `crop` takes the last ones back.

    Args:
        model: transformers causal LM in eval mode; until `close`, its attention works for this
            verifier's calls only.
        aux_layers: post-layer indices, k = output of decoder layer k with its residual added.
        capacity: rows to make room for at first.

    Raises:
        HarnessError: a layer that does not exist, or a verifier with recurrent layers, whose state
            cannot be cropped.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int], capacity: int = 1024) -> None:
        decoder: Any = decoder_of(model)
        config: Any = decoder.config
        self._model = model
        self._num_layers = config.num_hidden_layers
        self._capacity = capacity
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds <= {"full_attention", "sliding_attention", "chunked_attention"}:
            raise HarnessError(
                "the verifier's cache cannot be cropped",
                where="layer_types of the verifier's config.json",
                rule="attention in every layer",
                got=", ".join(sorted(kinds)),
                fix="evaluate with a serving engine instead of the local one",
            )
        check_aux_layers(aux_layers, self._num_layers)
        plain = kinds <= {"full_attention", "sliding_attention"}
        softcap = getattr(config, "attn_logit_softcapping", None)
        self._stock_attention = config._attn_implementation
        if plain and softcap is None and getattr(model, "_supports_sdpa", False):
            register()
            self._model.set_attn_implementation(GROUPED)
        self._cache_name = cache_argument(self._model)
        self._aux: dict[int, Tensor] = {}
        self._aux_layers = list(aux_layers)
        self._hooks = [
            decoder.layers[layer].register_forward_hook(self._keeper(layer))
            for layer in sorted(set(aux_layers))
        ]
        self.reset()

    def _keeper(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._aux[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def reset(self) -> None:
        """Forgets the sequence."""
        self._cache = buffer_cache(self._num_layers, self._capacity)

    @property
    def length(self) -> int:
        """Rows in the cache."""
        return int(self._cache.get_seq_length())

    @property
    def device(self) -> torch.device:
        """Where token ids have to lie."""
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def forward(self, token_ids_N: Tensor, logits_rows: int) -> Rows:
        """See `eagle3.decode.Verifier`."""
        out = self._model(
            token_ids_N[None],
            use_cache=True,
            logits_to_keep=logits_rows,
            **{self._cache_name: self._cache},
        )
        aux_NLH = torch.stack([self._aux[layer] for layer in self._aux_layers], dim=1)
        return Rows(logits_MV=out.logits[0], aux_NLH=aux_NLH)

    def crop(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        for layer in self._cache.layers:
            assert isinstance(layer, BufferLayer)
            layer.keep(length)

    def close(self) -> None:
        """Gives the model back as it was: without hooks, with its own attention."""
        self._model.set_attn_implementation(self._stock_attention)
        for hook in self._hooks:
            hook.remove()
