"""A real browser without a screen, for tests that look at pages as people do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
needs_chromium = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on this machine (chromium on PATH)"
)


def chromium(profile: Path, address: str, *flags: str) -> tuple[str, str]:
    """Opens a page; returns what the flags print, and what the browser says, its console too.

    Args:
        profile: the browser's own folder.
    """
    assert PROGRAM is not None
    done = subprocess.run(
        [
            PROGRAM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            *flags,
            address,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout, done.stderr
