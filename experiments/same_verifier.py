"""Are hidden states of the verifier that was named? By what the data records of it.

Sizes and configuration say little: a finetuned or rounded verifier has those of the one that it
came from. In the pipeline the graph pairs states and verifier; on a command line anybody can be
named.
"""

from __future__ import annotations

from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from eagle3.verifier import HeadConfig


def check_same_verifier(
    dataset: StatesDataset, verifier: HeadConfig, revision: str | None = None
) -> None:
    """Refuses states that another verifier made.

    Weights decide where both sides have a fingerprint of them (or both a commit of the hub);
    elsewhere names do.

    Args:
        revision: the verifier's; None where only its head is at hand.

    Raises:
        HarnessError: another configuration, other weights, or another name.
    """
    dataset.check(verifier)
    made_by = dataset.meta.revision
    if revision is not None and made_by is not None and len(revision) == len(made_by):
        same, known = revision == made_by, f" (revision {revision})"
        recorded = f" (revision {made_by})"
    else:
        same, known, recorded = dataset.meta.verifier == verifier.verifier, "", ""
    if not same:
        raise HarnessError(
            "the hidden states were made by another verifier", where=dataset.folder,
            rule=f"states of {verifier.verifier}{known}",
            got=f"states of {dataset.meta.verifier}{recorded}",
            fix="--verifier-path with the verifier that made them; if it is the same one, correct "
            "verifier and revision in meta.json",
        )  # fmt: skip
