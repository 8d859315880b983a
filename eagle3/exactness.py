"""Greedy speculative decoding against plain decoding: equal, or different at a near-tie only.

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
class NearTie:
    """Where two greedy texts part, and by how little the verifier prefers one.

    Attributes:
        position: index among the new tokens.
        gap: fp64 logit of the verifier's best token minus that of the worse of the two.
    """

    id: str
    position: int
    plain: int
    speculative: int
    gap: float


def first_difference(
    name: str,
    prompt_ids: Sequence[int],
    plain_ids: Sequence[int],
    speculative_ids: Sequence[int],
    logits_after: Callable[[Sequence[int]], Tensor],
) -> NearTie | None:
    """None if both texts are equal, else the near-tie where they part.

    Args:
        name: of the prompt.
        logits_after: f64[V], the verifier's logits after the given tokens, in fp64.

    Raises:
        HarnessError: they part where the verifier is not in doubt.
    """
    if list(plain_ids) == list(speculative_ids):
        return None
    shared = min(len(plain_ids), len(speculative_ids))
    at = next((i for i in range(shared) if plain_ids[i] != speculative_ids[i]), None)
    if at is None:
        raise HarnessError(
            "plain and speculative decoding stop at different places",
            where=f"prompt {name}",
            rule="both stop at the same EOS or limit",
            got=f"{len(plain_ids)} and {len(speculative_ids)} tokens",
            fix="a fault of the decoder: report it",
        )
    logits_V = logits_after([*prompt_ids, *plain_ids[:at]])
    worse = min(float(logits_V[plain_ids[at]]), float(logits_V[speculative_ids[at]]))
    gap = float(logits_V.max()) - worse
    if not gap < NEAR_TIE:
        raise HarnessError(
            "speculative decoding gives another text than plain decoding",
            where=f"prompt {name}, new token {at}",
            rule=f"equal, or a gap below {NEAR_TIE} between the verifier's best tokens",
            got=f"tokens {plain_ids[at]} and {speculative_ids[at]}, gap {gap:.3g}",
            fix="a fault of the decoder or of the verifier's cache: report it",
        )
    return NearTie(name, at, plain_ids[at], speculative_ids[at], gap)
