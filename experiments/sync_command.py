"""`eagle3 sync`: what a dead store missed goes out, and dead runs are marked as such."""

from __future__ import annotations

from pathlib import Path

from stages.abandoned import close_abandoned
from stages.sending import State
from stages.tracking import journal_root, replay, resolve_store


def run(root: Path) -> None:
    """Prints what was sent, what was marked, and what waits for another store."""
    store, journals = resolve_store(root), journal_root(root)
    complete = replay(store, journals)
    print(f"{complete} run(s) completed in {store.uri}")
    marked, elsewhere = close_abandoned(store, journals)
    if marked:
        print(f"{len(marked)} run(s) that nobody runs any more marked as KILLED: {marked}")
    if elsewhere:
        print(
            f"{elsewhere} run(s) are running on other machines or in other folders, or died there"
        )
    states = [state for folder in journals.glob("*/") if (state := State.read(folder))]
    for uri in sorted({s.store for s in states if s.store != store.uri and not s.closed}):
        print(f"journals wait for another store: MLFLOW_TRACKING_URI={uri} eagle3 sync sends them")
