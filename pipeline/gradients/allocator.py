"""A setting of the C library that keeps the memory of queues in the process instead of faulting it in anew."""

from __future__ import annotations

import ctypes

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Let freed tensors on the CPU stay in the process for the next ones; whether the C library can.

    Between I and W a queue holds more memory than a plain backward, and gives it back in one go: by default glibc
    returns it to the system, so that every micro-batch takes its page faults again. The settings hold for the whole
    process and for good: its resident memory stays at its peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
