"""`eagle3 sync`: what a dead store missed goes out, and dead runs are marked as such."""

from __future__ import annotations

from pathlib import Path

from stages.abandoned import close_abandoned
from stages.sending import State, asking
from stages.tracking import journal_root, replay, resolve_store


def run(root: Path) -> None:
    """Prints what was sent, what was marked, and what waits for another store.

    Raises:
        HarnessError: the store does not answer; nothing that waits is lost.
    """
    store, journals = resolve_store(root), journal_root(root)
    sent = replay(store, journals)
    if not sent:
        print(f"nothing waited to be sent to {store.uri}")
    else:
        print(f"{len(sent)} run(s) are complete now in {store.uri}:")
    for about in sent:
        print(f"  {about['run_id']}  {about['name']}")
    marked: list[str] = []
    elsewhere = 0
    if store.is_there:
        with asking(store):
            marked, elsewhere = close_abandoned(store, journals)
    if marked:
        print(f"{len(marked)} run(s) that nobody runs any more are marked as KILLED:")
    for run_id in marked:
        print(f"  {run_id}")
    if elsewhere:
        print(
            f"{elsewhere} run(s) are running on other machines or in other folders, or died there"
        )
    states = [state for folder in journals.glob("*/") if (state := State.read(folder))]
    waiting = [state for state in states if state.store != store.uri and not state.closed]
    for uri in sorted({state.store for state in waiting}):
        names = ", ".join(sorted(state.run_name for state in waiting if state.store == uri))
        print(f"for another store wait: {names}")
        print(f"  MLFLOW_TRACKING_URI={uri} eagle3 sync sends them")
