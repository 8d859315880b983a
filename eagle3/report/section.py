"""What a part of the page is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A part of the page; the body is HTML."""

    id: str
    title: str
    body: str
