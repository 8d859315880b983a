"""Named random generators: the same name gives the same numbers, whatever ran before.

A generator's name says what it is for (`"noise", run seed, epoch, sample id`), so that a resumed
run and a run on another number of processes draw what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*name: object) -> int:
    """A 63-bit seed from the parts of a name."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in name)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(*name: object, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator seeded by its name."""
    made = torch.Generator(device=device)
    made.manual_seed(seed_of(*name))
    return made
