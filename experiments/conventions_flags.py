"""Flags for what hidden states of other programs do not say, as settings."""

from __future__ import annotations

from eagle3.conventions import Conventions
from eagle3.errors import HarnessError
from eagle3.settings import read_settings


def layers(text: str | None, flag: str) -> list[int] | None:
    """`2,30,58` as numbers.

    Raises:
        HarnessError: anything else.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise HarnessError(
            "layers cannot be read", where=flag, rule="numbers with commas between, as 2,30,58",
            got=text, fix=f"{flag} 2,30,58",
        ) from None  # fmt: skip


def conventions(
    aux_layers: str | None,
    final_hidden: str | None,
    mask_alignment: str | None,
    padding_rows: str,
) -> Conventions:
    """The four flags, checked."""
    values = {
        "aux_layers": layers(aux_layers, "--aux-layers"),
        "final_hidden": final_hidden,
        "mask_alignment": mask_alignment,
        "padding_rows": padding_rows,
    }
    return read_settings(
        Conventions, values, where="--final-hidden, --mask-alignment, --padding-rows"
    )
