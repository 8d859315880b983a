"""Process-wide settings that make numerical work on a CPU faster, results unchanged."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes glibc reuse large freed blocks instead of giving them back to the system.

    A training step frees and takes the same large tensors over and over; fetching their pages
    anew each time costs more than most element-wise kernels on them. Does nothing without glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
