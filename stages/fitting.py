"""Whether the settings of later stages fit the verifier, asked as soon as it is known.

The stages themselves refuse what does not fit, but only when their turn comes: after hours of
generating, for a large verifier. Knows the few keys whose range a verifier sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.errors import HarnessError
from eagle3.verifier import HeadConfig


def check_fits(params: Mapping[str, Any], verifier: HeadConfig, *, where: str) -> None:
    """Compares draft vocabularies and aux layers with the verifier.

    Args:
        params: all sections; a missing one is not looked at.
        where: the file they come from, for the error.

    Raises:
        HarnessError: names key, rule and value.
    """
    for section in ("vocab", "sibling_vocab"):
        size = (params.get(section) or {}).get("size")
        if isinstance(size, int) and size > verifier.vocab_size:
            raise HarnessError(
                "draft vocabulary larger than the verifier's",
                where=f"{where}, {section}.size",
                rule=f"at most {verifier.vocab_size}, the tokens of {verifier.verifier}",
                got=size,
                fix="a smaller number, or null for all of the verifier's tokens",
            )
    layers = (params.get("extract") or {}).get("aux_layers") or []
    if any(isinstance(k, int) and not 0 <= k < verifier.num_hidden_layers for k in layers):
        raise HarnessError(
            "the verifier has no such layer",
            where=f"{where}, extract.aux_layers",
            rule=f"0 to {verifier.num_hidden_layers - 1}, the layers of {verifier.verifier}",
            got=layers,
            fix="other layers, or null for a low, a middle and a high one",
        )
