"""Checkpoints whose names and contents do not depend on the layout, on torch.distributed.checkpoint."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.optim import Optimizer

from partition import Profile
from pipeline.chunks import Chunk, Described, Entries, ReadPlanner, WritePlanner, sorted_out
from pipeline.errors import CheckpointError
from pipeline.mesh import Mesh
from pipeline.module import Tie
from pipeline.state import agreed_misfit
from pipeline.stretches import Piece, Stretch
from pipeline.ties import owner_name

__all__ = [
    "latest",
    "load_tensors",
    "master_entries",
    "optimizer_entries",
    "optimizer_targets",
    "read_header",
    "require_fit",
    "restore_masters",
    "restore_optimizer",
    "save",
]

_LATEST = "latest"
_HEADER = "header.pt"
_PROFILE = "profile.json"


def save(
    directory: Path,
    step: int,
    tensors: Entries,
    header: Mapping[str, Any],
    profile: Profile | None,
    mesh: Mesh,
) -> Path:
    """Write ``directory/step-N`` and point ``directory/latest`` to it.  Collective.

    It is written under another name and renamed when it is whole, so that what stands under its name is complete.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".partial-step-{step:08d}"

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        torch.save(dict(header), partial / _HEADER)
        if profile is not None:
            profile.save(partial / _PROFILE)

    def publish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        pointer = directory / f".{_LATEST}"
        pointer.write_text(final.name)
        os.replace(pointer, directory / _LATEST)

    _on_first(prepare, directory, mesh)
    _write(tensors, partial, mesh)
    mesh.world.barrier()
    _on_first(publish, directory, mesh)
    return final


def _on_first(act: Callable[[], None], directory: Path, mesh: Mesh) -> None:
    """Let rank 0 do something to files, and raise ``CheckpointError`` on every rank if it cannot.  Collective."""
    error = None
    if mesh.rank == 0:
        try:
            act()
        except OSError as raised:
            error = raised
    told = mesh.world.broadcast_object(None if error is None else str(error), 0)
    if told is not None:
        raise CheckpointError(f"cannot write a checkpoint into {directory}: {told}") from error


def _write(tensors: Entries, path: Path, mesh: Mesh) -> None:
    """Every rank writes its own tensors; ranks that are threads of one process have one writer."""
    if mesh.size > 1 and mesh.random_lock is None:
        whole, chunks = sorted_out([tensors])
        write(whole, storage_writer=FileSystemWriter(path), planner=WritePlanner(chunks))
        return
    everyone = mesh.world.all_gather_object(tensors)
    if mesh.rank == 0:
        whole, chunks = sorted_out(everyone)
        with _for_itself():
            write(whole, storage_writer=FileSystemWriter(path), planner=WritePlanner(chunks), no_dist=True)


@contextmanager
def _for_itself() -> Iterator[None]:
    """A process reads or writes without the others, on purpose: torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def latest(path: Path) -> Path:
    """The checkpoint to load: ``path`` itself, or the newest whole one of a directory of checkpoints.

    Raises ``CheckpointError`` where there is none.
    """
    if (path / _HEADER).is_file():
        return path
    try:
        found = path / (path / _LATEST).read_text().strip()
    except OSError:
        found = path
    if not (found / _HEADER).is_file():
        raise CheckpointError(f"there is no checkpoint in {path}: neither {_HEADER} nor {_LATEST} is there")
    return found


def read_header(path: Path) -> tuple[dict[str, Any], Profile | None]:
    """What a checkpoint says beside its tensors, and the profile its layout was made from."""
    with _readable(path):
        header: dict[str, Any] = torch.load(path / _HEADER, weights_only=True)
    profile = path / _PROFILE
    return header, Profile.load(profile) if profile.is_file() else None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever is raised for files that are damaged is an error of the checkpoint."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, UnpicklingError, CheckpointException) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} cannot be read, it is damaged or not whole: {reason[-1]}") from error


def require_fit(
    path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor], optimizer: Optimizer | None, mesh: Mesh
) -> None:
    """Raise ``CheckpointError`` on every rank when a checkpoint is not of this model and optimizer.  Collective.

    ``tensors`` are those of this rank's part of the model: together they must be all that is stored.
    """
    stored: Mapping[str, Described] = {}
    try:
        stored = _stored(path)
        misfit = _misfit(stored, header, tensors, optimizer)
        reason = f"{path} does not fit: {misfit}" if misfit else ""
    except CheckpointError as error:
        reason = str(error)
    of_model = [name for name in stored if name.startswith("model.")]
    reason, surplus = agreed_misfit(reason, list(tensors), of_model, mesh.world)
    if surplus and not reason:
        reason = f"{path} does not fit: it has {surplus[0]!r}, and the model has not"
    if reason:
        raise CheckpointError(reason)


def _misfit(
    stored: Mapping[str, Described],
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    optimizer: Optimizer | None,
) -> str:
    """What is in the way of loading, empty if nothing is."""
    for name, tensor in tensors.items():
        if name not in stored:
            return f"it has no {name!r}"
        if stored[name].size != tensor.shape:
            return f"{name} has shape {stored[name].size}, the model needs {tuple(tensor.shape)}"
    if optimizer is None or "groups" not in header:
        return ""
    kind, groups, saved = type(optimizer).__name__, len(optimizer.param_groups), len(header["groups"])
    if kind != header.get("optimizer", kind):
        return f"it goes on with {header['optimizer']}, not {kind}: pass the same optimizer to initialize"
    if groups != saved:
        return f"its optimizer has {saved} parameter groups, this one {groups}: pass the same param_groups"
    return ""


def load_tensors(path: Path, wanted: Entries) -> None:
    """Fill tensors by name, in place; ``require_fit`` has found that they are there."""
    if wanted:
        whole, chunks = sorted_out([wanted])
        with _readable(path), _for_itself():
            load(whole, storage_reader=FileSystemReader(path), planner=ReadPlanner(chunks), no_dist=True)


def _stored(path: Path) -> dict[str, Described]:
    with _readable(path):
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: Described(entry.properties.dtype, tuple(entry.size))
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


# -- the optimizer's state, by parameter ---------------------------------------------------------------------


FlatParameters = Sequence[tuple[Stretch, nn.Parameter]]


def optimizer_entries(optimizer: Optimizer, flat: FlatParameters, ties: Sequence[Tie]) -> dict[str, Tensor | Chunk]:
    """Each tensor of each parameter's state by name: what this rank holds of it, or what has no part for each element,
    such as the number of steps."""
    entries: dict[str, Tensor | Chunk] = {}
    for stretch, parameter in flat:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                for piece in stretch.pieces:
                    name = f"optimizer.{key}.{owner_name(ties, stretch.layer, piece.name)}"
                    entries[name] = value
                    if value.shape == parameter.shape:  # else a number, or what is kept of a matrix instead of it
                        entries[name] = _chunk(value, piece)
    return entries


def master_entries(flat: FlatParameters, ties: Sequence[Tie]) -> dict[str, Chunk]:
    """What this rank holds of the weights that the optimizer steps on, whose rounding alone is in the model."""
    return {
        f"master.{owner_name(ties, stretch.layer, piece.name)}": _chunk(stretch.parameters, piece)
        for stretch, _ in flat
        if stretch.master
        for piece in stretch.pieces
    }


def restore_masters(flat: FlatParameters, ties: Sequence[Tie], path: Path) -> None:
    """Set the weights that the optimizer steps on, where a checkpoint has more of them than the model's rounding."""
    stored = _stored(path)
    wanted = {
        f"master.{owner_name(ties, stretch.layer, piece.name)}": _chunk(stretch.parameters, piece)
        for stretch, _ in flat
        for piece in stretch.pieces
    }
    load_tensors(path, {name: chunk for name, chunk in wanted.items() if name in stored})


def _chunk(values: Tensor, piece: Piece) -> Chunk:
    return Chunk(values.view(-1)[piece.start : piece.stop], piece.offset, piece.numel)


def restore_optimizer(optimizer: Optimizer, flat: FlatParameters, ties: Sequence[Tie], path: Path) -> None:
    """Rebuild the optimizer's state from a checkpoint of any layout."""
    load_tensors(path, optimizer_targets(optimizer, flat, ties, _stored(path)))


def optimizer_targets(
    optimizer: Optimizer, flat: FlatParameters, ties: Sequence[Tie], stored: Mapping[str, Described]
) -> dict[str, Tensor | Chunk]:
    """Give parameters all the state that is ``stored`` of them, 0 until what is returned has been filled."""
    keys: dict[str, list[str]] = {}
    for full in stored:
        kind, _, rest = full.partition(".")
        key, _, owner = rest.partition(".")
        if kind == "optimizer":
            keys.setdefault(owner, []).append(key)
    wanted: dict[str, Tensor | Chunk] = {}
    for stretch, parameter in flat:
        state: dict[str, Tensor] = {}
        for piece in stretch.pieces:
            owner = owner_name(ties, stretch.layer, piece.name)
            for key in keys.get(owner, ()):
                name = f"optimizer.{key}.{owner}"
                dtype, size = stored[name]
                if size == (piece.numel,):
                    whole = state.setdefault(key, torch.zeros(parameter.shape, dtype=dtype, device=parameter.device))
                    wanted[name] = _chunk(whole, piece)
                else:
                    device = parameter.device if size else _scalar_device(optimizer, parameter)
                    wanted[name] = state.setdefault(key, torch.zeros(size, dtype=dtype, device=device))
        if state:
            optimizer.state[parameter] = state
    return wanted


def _scalar_device(optimizer: Optimizer, parameter: nn.Parameter) -> torch.device:
    """torch keeps an optimizer's step counters in host memory, unless the whole update runs on the device."""
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return parameter.device if on_device else torch.device("cpu")
