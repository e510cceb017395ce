"""Reading checkpoints: the newest whole one of a folder, whether it is of this model, and its values in this layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from partition import Profile
from pipeline.entries import BUFFER, WEIGHTS, arrived, kept, shapes, wanted
from pipeline.errors import CheckpointError, TrainingWarning
from pipeline.mesh import Mesh
from pipeline.runner import Runner
from pipeline.saving import files
from pipeline.saving.folder import candidates
from pipeline.saving.manifest import Manifest, damage
from pipeline.saving.saver import HEADER, PROFILE
from pipeline.state import agreed_misfit

__all__ = ["Opened", "is_checkpoint", "open_checkpoint", "require_fit", "restore"]


class Opened(NamedTuple):
    """A checkpoint whose files are whole."""

    path: Path
    manifest: Manifest
    header: Mapping[str, Any]
    profile: Profile | None


def open_checkpoint(path: Path, mesh: Mesh) -> Opened | None:
    """The checkpoint ``path``, or the newest whole one of a folder of checkpoints, None where it has none.  Collective.

    Damaged ones of a folder are named in a warning.  Raises ``CheckpointError`` on every rank where ``path`` itself is
    one that is damaged, and where none of a folder is whole.
    """
    alone = is_checkpoint(path)
    found, alone = mesh.world.broadcast_object(([path] if alone else candidates(path), alone), 0)
    problems: list[str] = []
    for one in found:
        opened, problem = _opened(one, mesh)
        if opened is not None:
            if problems and mesh.rank == 0:
                text = f"{'; '.join(problems)}; going on from {one}, the one before"
                warnings.warn(text, TrainingWarning, stacklevel=3)
            return opened
        problems.append(problem)
    if problems:
        none = "" if alone else f"no checkpoint in {path} is whole: "
        raise CheckpointError(none + "; ".join(problems))
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, be it whole or not, and no folder of checkpoints."""
    return (path / HEADER).exists() or path.name.startswith("step-")


def _opened(path: Path, mesh: Mesh) -> tuple[Opened | None, str]:
    """A checkpoint, or what is wrong with it: the same on every rank, each of which looks at a part of the files."""
    opened, problem = None, ""
    try:
        manifest = Manifest.read(path)
        names = sorted(manifest.files)
        problem = damage(path, manifest, names[mesh.rank :: mesh.size])
        if not problem:
            with files.readable(path):
                header = torch.load(path / HEADER, weights_only=True)
            profile = Profile.load(path / PROFILE) if PROFILE in manifest.files else None
            opened = Opened(path, manifest, header, profile)
    except CheckpointError as error:
        problem = str(error)
    told = [text for text in mesh.world.all_gather_object(problem) if text]
    return (None, told[0]) if told else (opened, "")


def require_fit(opened: Opened, runner: Runner, mesh: Mesh) -> None:
    """Raise ``CheckpointError`` on every rank when a checkpoint is not of this model and optimizer.  Collective."""
    manifest, needed = opened.manifest, shapes(runner)
    buffers = [name for name in kept(runner, 0, 1) if name.startswith(f"{BUFFER}.")]
    optimizer = None if runner.update is None else runner.update.optimizer
    misfit = _misfit(manifest, needed, buffers, optimizer)
    known = [name for name in manifest.entries if name.partition(".")[0] in (WEIGHTS, BUFFER)]
    misfit, surplus = agreed_misfit(misfit, [*needed, *buffers], known, mesh.world)
    if surplus and not misfit:
        misfit = f"it has {_shown(surplus[0])}, and the model has not"
    if misfit:
        raise CheckpointError(f"{opened.path} does not fit: {misfit}")


def _misfit(
    manifest: Manifest, needed: Mapping[str, tuple[int, ...]], buffers: Sequence[str], optimizer: Optimizer | None
) -> str:
    """What is in the way of loading, empty if nothing is."""
    for name, shape in needed.items():
        if name not in manifest.shapes:
            return f"it has no {_shown(name)}"
        if manifest.shapes[name] != shape:
            return f"{_shown(name)} has shape {manifest.shapes[name]}, the model needs {shape}"
    absent = next((name for name in buffers if name not in manifest.entries), None)
    if absent is not None:
        return f"it has no {_shown(absent)}"
    if optimizer is None or manifest.optimizer is None:
        return ""
    kind, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if kind != manifest.optimizer:
        return f"it goes on with {manifest.optimizer}, not {kind}: pass the same optimizer to initialize"
    if groups != manifest.groups:
        return f"its optimizer has {manifest.groups} parameter groups, this one {groups}: pass the same param_groups"
    return ""


def _shown(name: str) -> str:
    kind, _, rest = name.partition(".")
    return repr(rest if kind == WEIGHTS else f"layers.{rest}")


def restore(opened: Opened, runner: Runner) -> None:
    """Fill everything of this rank that is stored; ``require_fit`` has found that it fits."""
    stored = opened.manifest.described()
    needed = wanted(runner, stored)
    files.read(opened.path, {name: entry for name, entry in needed.items() if name in stored})
    arrived(runner, needed, trusted=False)
