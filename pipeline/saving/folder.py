"""A folder of checkpoints: each appears whole under its name, and the last good one is there at every moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.saving.manifest import MANIFEST

__all__ = ["candidates", "name_of", "partial_name", "publish", "sweep", "write_through"]

_LATEST = "latest"
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


def name_of(steps: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{steps:08d}"


def partial_name(steps: int) -> str:
    """Its name while it is not yet whole."""
    return f"{_PARTIAL}{name_of(steps)}"


def candidates(directory: Path) -> list[Path]:
    """The checkpoints in a folder, in the order in which to try them.

    First the one that was written last, then those of fewer steps, the newest first, and at the end those of more
    steps, from which training had turned back.
    """
    there = {path.name.removeprefix(_REPLACED): path for path in directory.glob(f"{_REPLACED}step-*")}
    there |= {path.name: path for path in directory.glob("step-*")}
    whole = sorted((name for name, path in there.items() if (path / MANIFEST).is_file()), reverse=True)
    try:
        last = (directory / _LATEST).read_text().strip()
    except OSError:
        last = whole[0] if whole else ""
    return [there[name] for name in sorted(whole, key=lambda name: name > last)]


def publish(partial: Path, manifest: str, keep: int | None) -> Path:
    """Give a checkpoint all of whose other files are safe its manifest and its name; leave the newest ``keep``.

    Whatever happens in between, either it or the one before is found by ``candidates``.
    """
    directory, name = partial.parent, partial.name.removeprefix(_PARTIAL)
    final, replaced = directory / name, directory / f"{_REPLACED}{name}"
    write_through(partial / MANIFEST, manifest.encode())
    _sync(partial)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync(directory)
    pointer = directory / f".{_LATEST}"
    write_through(pointer, name.encode())
    pointer.replace(directory / _LATEST)
    _sync(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep is not None:
        older = sorted(path for path in directory.glob("step-*") if path.name <= name)
        for path in older[:-keep]:
            _remove(path)
    return final


def sweep(directory: Path) -> None:
    """Remove what saves have left that never came to their end."""
    for path in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{_REPLACED}*"):
        if (directory / path.name.removeprefix(_REPLACED) / MANIFEST).is_file():
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; what is left of it if that is interrupted is none."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def write_through(path: Path, contents: bytes) -> None:
    """Write a file, down to the disk."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Bring the names in a folder down to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
