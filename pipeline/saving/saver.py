"""Writing checkpoints: what ranks keep is copied between two steps, and written while the next ones run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from threading import Thread
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from partition import Profile
from pipeline.chunks import Chunk, Chunks
from pipeline.entries import EXTRA, Entries, Entry
from pipeline.errors import CheckpointError, PipelineError
from pipeline.links.distributed_group import DistributedGroup
from pipeline.links.protocol import Group
from pipeline.mesh import Mesh
from pipeline.saving import files, folder
from pipeline.saving.manifest import FileSum, Manifest, file_sum
from pipeline.switching import quick_switching

__all__ = ["HEADER", "PROFILE", "Contents", "Saver"]

HEADER, PROFILE = "header.pt", "profile.json"

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Contents:
    """What is to be written: entries of this rank and the shapes of its parameters, and what all ranks have alike."""

    entries: Entries
    shapes: Mapping[str, tuple[int, ...]]
    manifest: Manifest
    header: bytes
    profile: Profile | None


class _Part(NamedTuple):
    """What one rank writes, or with threads all of them."""

    chunks: Chunks
    forms: Mapping[str, tuple[str, tuple[int, ...]]]
    shapes: Mapping[str, tuple[int, ...]]


def _joined(parts: Sequence[_Part]) -> _Part:
    return _Part(
        {place: chunk for part in parts for place, chunk in part.chunks.items()},
        {name: form for part in parts for name, form in part.forms.items()},
        {name: shape for part in parts for name, shape in part.shapes.items()},
    )


class Saver:
    """Writes one checkpoint after the other.  Every rank has one, and all call the same of it in the same order.

    Ranks that are processes each write what they keep; where they are threads of one process, rank 0 writes for all.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._thread: Thread | None = None
        self._path: Path | None = None
        self._problem = ""
        self.stall = 0.0
        """Seconds for which the last save held up training."""
        self.seconds = 0.0
        """Seconds that the last one to end took to be written."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, as far as this rank knows."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def staged(self) -> int:
        """Bytes of host memory that this rank keeps for copies of what is written."""
        return sum(copy.nbytes for copy in self._memory.values())

    def save(self, directory: Path, contents: Contents, *, keep: int | None, wait: bool) -> Path:
        """Write ``directory/step-N``; without ``wait`` it is written while training goes on.  Collective.

        Raises ``CheckpointError`` on every rank when it waits and it cannot be written; else ``problem`` tells of it.
        """
        started = time.perf_counter()
        self.settle()
        mesh, threads = self._mesh, self._mesh.random_lock is not None
        forms = {name: _form(entry) for name, entry in contents.entries.items()}
        part = _Part(files.chunks_of(contents.entries), forms, contents.shapes)
        if threads or not wait:
            part = part._replace(chunks=self._copied(part.chunks))
        if threads:
            part = _joined(mesh.world.all_gather_object(part))
        group = None if threads or mesh.size == 1 else mesh.world if wait else mesh.aside()
        job = _Job(mesh.rank, directory, part, contents, keep, group)
        if not threads or mesh.rank == 0:
            if wait:
                self._run(job)
            else:
                self._thread = Thread(target=self._run, args=(job,), name="pipeloom checkpoint")
                self._thread.start()
        self._path = directory / folder.name_of(contents.manifest.steps)
        self.stall = time.perf_counter() - started
        return self.finish() if wait else self._path

    def finish(self) -> Path:
        """Wait until what is being written is safe, and return where.  Collective.

        Raises ``CheckpointError`` on every rank when it could not be written.
        """
        self.settle()
        problem = self._mesh.world.broadcast_object(self._problem, 0)
        self._problem = ""
        if problem:
            raise CheckpointError(problem)
        if self._path is None:
            raise CheckpointError("no checkpoint has been saved yet")
        return self._path

    def problem(self) -> str:
        """Why the last checkpoint, written while training went on, could not be: told once."""
        if self.busy:
            return ""
        told, self._problem = self._problem, ""
        return told

    def settle(self) -> None:
        """Wait until nothing is being written by this rank any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: _Job) -> None:
        started = time.perf_counter()
        try:
            with quick_switching():  # or training waits for what is written in Python
                job.run()
        except (OSError, RuntimeError, PipelineError) as error:
            where = job.directory / folder.name_of(job.contents.manifest.steps)
            self._problem = f"cannot write the checkpoint {where}: {error}"
        self.seconds = time.perf_counter() - started

    def _copied(self, chunks: Chunks) -> Chunks:
        """Copies in host memory that is used again for the next checkpoint, and that no step changes."""
        memory: dict[tuple[str, int], Tensor] = {}
        copies: dict[tuple[str, int], Chunk] = {}
        for place, chunk in chunks.items():
            old = self._memory.get(place)
            fits = old is not None and (old.dtype, old.shape) == (chunk.values.dtype, chunk.values.shape)
            copy = old if fits and old is not None else torch.empty_like(chunk.values, device="cpu")
            copy.copy_(chunk.values)
            memory[place] = copy
            copies[place] = Chunk(copy, chunk.offset, chunk.numel)
        self._memory = memory
        return copies


@dataclass(frozen=True, slots=True)
class _Job:
    """One checkpoint to write, by this rank's part of it; ``group`` is None where one rank writes for all."""

    rank: int
    directory: Path
    part: _Part
    contents: Contents
    keep: int | None
    group: Group | None

    def run(self) -> None:
        """Write it, down to the disk, and give it its name.

        Raises ``OSError`` on every rank when one cannot do its part; nothing is left then.
        """
        partial = self.directory / folder.partial_name(self.contents.manifest.steps)
        try:
            self._each(lambda: self._prepare(partial) if self.rank == 0 else None)
            told = self._each(lambda: self._write(partial))
            self._each(lambda: self._publish(partial, told) if self.rank == 0 else None)
        except BaseException:
            if self.rank == 0:
                rmtree(partial, ignore_errors=True)
            raise

    def _each(self, act: Callable[[], Told]) -> list[Told]:
        """What ranks give when each does its part; the first error of any, on every rank."""
        problem, done = "", None
        try:
            done = act()
        except OSError as error:
            problem = str(error)
        told = [(problem, done)] if self.group is None else self.group.all_gather_object((problem, done))
        failed = next((text for text, _ in told if text), "")
        if failed:
            raise OSError(failed)
        return [cast(Told, given) for _, given in told]

    def _prepare(self, partial: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        folder.sweep(self.directory)
        partial.mkdir()
        folder.write_through(partial / HEADER, self.contents.header)
        if self.contents.profile is not None:
            self.contents.profile.save(partial / PROFILE)

    def _write(self, partial: Path) -> tuple[dict[str, FileSum], _Part]:
        """Write what this rank keeps; the sums of its files, and what is in them, without the values."""
        for (name, _), chunk in self.part.chunks.items():
            if name.startswith(f"{EXTRA}."):
                _require_plain(name, chunk.values)
        partial.mkdir(parents=True, exist_ok=True)  # on another host it may be another folder, which is told later
        group = self.group.process_group if isinstance(self.group, DistributedGroup) else None
        files.write(self.part.chunks, partial, group)
        mine = [path for path in partial.iterdir() if path.name.startswith(f"__{self.rank}_")]
        if self.rank == 0:
            mine += [path for path in partial.iterdir() if not path.name.startswith("__")]
        return {path.name: file_sum(path) for path in mine}, self.part._replace(chunks={})

    def _publish(self, partial: Path, told: Sequence[tuple[dict[str, FileSum], _Part]]) -> None:
        sums = {name: found for files_of_rank, _ in told for name, found in files_of_rank.items()}
        _, forms, shapes = _joined([part for _, part in told])
        missing = [name for name in sums if not (partial / name).is_file()]
        if missing:
            raise OSError(
                f"{missing[0]}, which another rank has written, is not there: all hosts must see the same "
                f"{partial.parent}"
            )
        manifest = self.contents.manifest.model_copy(update={"entries": forms, "shapes": shapes, "files": sums})
        folder.publish(partial, manifest.text(), self.keep)


def _require_plain(name: str, values: Tensor) -> None:
    """Raise ``OSError`` for extra state that loading would refuse."""
    try:
        torch.load(BytesIO(values.cpu().numpy().tobytes()), weights_only=True)
    except UnpicklingError as error:
        raise OSError(
            f"layer {name.removeprefix(EXTRA)[1:]} gives in get_extra_state what cannot be loaded safely again; let it "
            f"give tensors, numbers, text, and lists or dicts of these"
        ) from error


def _form(entry: Entry) -> tuple[str, tuple[int, ...]]:
    return str(entry.chunks[0].values.dtype).removeprefix("torch."), entry.size
