"""Greedy speculative decoding against plain decoding: where their texts part, and by how little.

Passes over one row and over several round differently, so that where the verifier's two best tokens
are nearly equal either may win; from there on the texts differ legitimately. Anything else is a
fault of the decoder. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from eagle3.errors import HarnessError

# Fp32 logits of passes of different shapes were seen to differ by 8e-5.
NEAR_TIE = 2e-4


@dataclass(frozen=True)
class Parting:
    """Where two greedy texts of a prompt part, and by how little the verifier prefers one.

    Attributes:
        id: of the prompt.
        position: index among the new tokens.
        plain, speculative: the two tokens; None for a text that ends where the other goes on.
        gap: fp64 logit of the verifier's best token minus that of the worse of the two; None where
            one is none.
    """

    id: str
    position: int
    plain: int | None
    speculative: int | None
    gap: float | None


def parting(
    name: str,
    prompt_ids: Sequence[int],
    plain_ids: Sequence[int],
    speculative_ids: Sequence[int],
    logits_after: Callable[[Sequence[int]], Tensor],
) -> Parting | None:
    """None if both texts are equal.

    Args:
        name: of the prompt.
        logits_after: f64[V], the verifier's logits after the given tokens, in fp64.
    """
    if list(plain_ids) == list(speculative_ids):
        return None
    shared = min(len(plain_ids), len(speculative_ids))
    at = next((i for i in range(shared) if plain_ids[i] != speculative_ids[i]), shared)
    plain, other = (text[at] if at < len(text) else None for text in (plain_ids, speculative_ids))
    gap = None
    if plain is not None and other is not None:
        logits_V = logits_after([*prompt_ids, *plain_ids[:at]])
        gap = float(logits_V.max() - logits_V[[plain, other]].min())
    return Parting(name, at, plain, other, gap)


def check_near_tie(found: Parting) -> None:
    """Refuses texts that part anywhere else than at a near-tie.

    Raises:
        HarnessError: they part where the verifier is not in doubt, or one ends early.
    """
    if found.gap is None:
        raise HarnessError(
            "plain and speculative decoding stop at different places",
            where=f"prompt {found.id}",
            rule="both stop at the same EOS or limit",
            got=f"one ends after {found.position} tokens, the other goes on",
            fix="a fault of the decoder: report it",
        )
    if not found.gap < NEAR_TIE:
        raise HarnessError(
            "speculative decoding gives another text than plain decoding",
            where=f"prompt {found.id}, new token {found.position}",
            rule=f"equal, or a gap below {NEAR_TIE} between the verifier's best tokens",
            got=f"tokens {found.plain} and {found.speculative}, gap {found.gap:.3g}",
            fix="a fault of the decoder or of the verifier's cache: report it",
        )
