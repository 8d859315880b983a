"""Runs that a store holds as running although nobody runs them any more.

A run says of itself on which machine and in which folder its journal lies. Where that is here and
no living process holds the journal, the run is dead. Runs of other machines are only counted.
"""

from __future__ import annotations

import platform
from pathlib import Path

from stages.sending import State, lock_journal, open_client
from stages.tracking import HOST_TAG, JOURNALS_TAG, Store


def close_abandoned(store: Store, journals: Path) -> tuple[list[str], int]:
    """Marks dead runs as KILLED; call after `replay`, which ends those whose journal is left.

    Returns:
        ids of the runs that were marked, and how many run elsewhere, as far as the store knows.
    """
    client, experiment = open_client(store)
    living = set()
    for folder in journals.glob("*/"):
        lock = lock_journal(folder, wait=False)
        if lock is None:
            state = State.read(folder)
            living.add(state.journal if state else None)
        else:
            lock.close()
    marked, elsewhere = [], 0
    token: str | None = None
    while True:
        page = client.search_runs([experiment], "attributes.status = 'RUNNING'", page_token=token)
        for run in page:
            tags = run.data.tags
            here = (tags.get(HOST_TAG), tags.get(JOURNALS_TAG)) == (platform.node(), str(journals))
            if not here:
                elsewhere += 1
            elif tags.get("journal") not in living:
                marked.append(run.info.run_id)
        token = page.token
        if not token:
            break
    for run_id in marked:
        client.set_terminated(run_id, "KILLED")
    return marked, elsewhere
