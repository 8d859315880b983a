"""Whether the settings of later stages fit the verifier, asked as soon as it is known.

The stages themselves refuse what does not fit, but only when their turn comes: after hours of
generating, for a large verifier. Knows the few keys whose range a verifier sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.errors import HarnessError
from eagle3.verifier import HeadConfig

DEFAULT_LAYERS_NEED = 7  # layers of a verifier, for a low, a middle and a high one that differ


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
    extract = params.get("extract") or {}
    layers = extract.get("aux_layers") or []
    known = verifier.num_hidden_layers
    if extract.get("aux_layers", []) is None and known < DEFAULT_LAYERS_NEED:
        raise HarnessError(
            "the verifier is too shallow for the default aux layers",
            where=f"{where}, extract.aux_layers",
            rule=f"null needs a verifier of {DEFAULT_LAYERS_NEED} layers or more",
            got=f"null, and {verifier.verifier} with {known} layers",
            fix=f"name layers from 0 to {known - 1}, in ascending order",
        )
    if any(isinstance(k, int) and not 0 <= k < known for k in layers):
        raise HarnessError(
            "the verifier has no such layer",
            where=f"{where}, extract.aux_layers",
            rule=f"0 to {known - 1}, the layers of {verifier.verifier}",
            got=layers,
            fix="other layers, or null for a low, a middle and a high one",
        )
