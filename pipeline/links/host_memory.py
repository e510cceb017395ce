"""Memory that all ranks of a host share, where the ranks are processes."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from pipeline.links.protocol import Group

__all__ = ["common_name", "host_folder", "shared_bytes"]

_IN_MEMORY = Path("/dev/shm")


def host_folder() -> Path:
    """A folder that the ranks of a host share: one in memory if there is such, else the one for temporary files."""
    return _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def common_name(world: Group) -> str:
    """A name for files, new at each call and the same on every rank.  Collective over the world."""
    name: str = world.broadcast_object(f"pipeloom-{secrets.token_hex(8)}", source=0)
    return name


def shared_bytes(world: Group, size: int, folder: Path | None = None) -> mmap.mmap:
    """``size`` zeroed bytes, the same for all ranks of a host.  Collective over the world.

    They live in a file that has lost its name by the time this returns, so that nothing is left behind
    however the processes end.  ``folder`` must be one that the ranks of a host share, by default ``host_folder()``.
    Raises ``OSError`` on every rank when a host has no room for them, rather than let one die when it writes there.
    """
    path = (folder or host_folder()) / common_name(world)
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        refusals = [text for text in world.all_gather_object(_refusal(file, size)) if text]
        with suppress(FileNotFoundError):
            path.unlink()  # every rank of this host has opened it; one of them is the first
        if refusals:
            raise OSError(refusals[0])
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _refusal(file: int, size: int) -> str:
    """Make room for ``size`` bytes; why there is none, or nothing."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.truncate(file, size)
    except OSError as error:
        return str(error)
    return ""
