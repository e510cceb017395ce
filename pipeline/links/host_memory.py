"""A few bytes that all ranks of a host share, where the ranks are processes."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from pipeline.links.protocol import Group

__all__ = ["shared_bytes"]

_IN_MEMORY = Path("/dev/shm")


def shared_bytes(world: Group, size: int, folder: Path | None = None) -> mmap.mmap:
    """``size`` zeroed bytes, the same for all ranks of a host.  Collective over the world.

    They live in a file that has lost its name by the time this returns, so that nothing is left behind
    however the processes end.  ``folder`` must be one that the ranks of a host share; by default one in
    memory if there is such, else the one for temporary files.
    """
    if folder is None:
        folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    name = world.broadcast_object(f"pipeloom-{secrets.token_hex(8)}", source=0)
    path = folder / name
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(file, size)
        memory = mmap.mmap(file, size)
    finally:
        os.close(file)
    world.barrier()  # every rank of this host has opened it
    with suppress(FileNotFoundError):
        path.unlink()  # one of them is the first
    return memory
