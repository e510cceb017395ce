"""The tensors of a checkpoint in files of torch.distributed.checkpoint, which its own tools can read as well."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO, cast

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeline.chunks import Chunk, Chunks, ReadPlanner, WritePlanner
from pipeline.entries import Entries
from pipeline.errors import CheckpointError

__all__ = ["chunks_of", "read", "readable", "write"]


def chunks_of(entries: Entries) -> dict[tuple[str, int], Chunk]:
    """What is in entries, by name and offset."""
    return {(name, chunk.offset): chunk for name, entry in entries.items() for chunk in entry.chunks}


def write(chunks: Chunks, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write chunks, down to the disk.  Collective over a group, in which each rank gives its own; None for one alone.

    Raises ``OSError`` on every rank when one of them cannot.
    """
    writer, planner = _Writer(folder), WritePlanner(chunks)
    try:
        if group is None:
            with _for_itself():
                save({}, storage_writer=writer, planner=planner, no_dist=True)
        else:
            save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first if isinstance(first, OSError) else OSError(f"{type(first).__name__}: {first}") from error


class _Writer(FileSystemWriter):
    """Torch's, but for the form of each tensor in the file, which ``torch.load`` reads as well.

    An archive for each, as torch makes them, takes three times as long for small ones, and speaks of positions in the
    file where the disk is full.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with open(Path(self.path) / name, "wb") as stream:
            whole = cast("BinaryIO", _Written(stream))
            for item in plan.items:
                offset = stream.tell()
                torch.save(planner.resolve_data(item), whole, _use_new_zipfile_serialization=False)
                length = stream.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            stream.flush()
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _Written:
    """A stream to write to without a number by which torch would write past it, and past Python's errors."""

    def __init__(self, stream: BinaryIO) -> None:
        self.write = stream.write
        self.flush = stream.flush


def read(path: Path, entries: Entries) -> None:
    """Fill what is wanted of a checkpoint, in place, whatever chunks it was written in."""
    chunks = chunks_of(entries)
    if chunks:
        with readable(path), _for_itself(), torch.no_grad():
            load({}, storage_reader=FileSystemReader(path), planner=ReadPlanner(chunks), no_dist=True)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever is raised for files that are damaged is an error of the checkpoint."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, UnpicklingError, CheckpointException) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} cannot be read, it is damaged or not whole: {reason[-1]}") from error


@contextmanager
def _for_itself() -> Iterator[None]:
    """A process reads or writes without the others, on purpose: torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
