"""The model of a checkpoint in a file of safetensors, which every library reads, by the model's own names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipeline.chunks import Chunk
from pipeline.entries import BUFFER, WEIGHTS, Entry
from pipeline.errors import CheckpointError, ConfigError
from pipeline.saving import files
from pipeline.saving.folder import candidates
from pipeline.saving.manifest import Manifest, damage
from pipeline.saving.opening import is_checkpoint

__all__ = ["export"]


def _model_of(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Parameters and buffers in a checkpoint, as ``full_state_dict`` names them; parameters that layers share have one
    entry, under the first layer."""
    problem = damage(path, manifest, manifest.files)
    if problem:
        raise CheckpointError(problem)
    model: dict[str, Tensor] = {}
    entries: dict[str, Entry] = {}
    for name, (dtype, size) in manifest.described().items():
        kind, _, rest = name.partition(".")
        if kind not in (WEIGHTS, BUFFER):
            continue
        values = torch.empty(size, dtype=dtype)
        entries[name] = Entry(size, [Chunk(values.view(-1), 0, values.numel())])
        model[rest if kind == WEIGHTS else f"layers.{rest}"] = values.view(manifest.shapes.get(name, size))
    files.read(path, entries)
    return model


def export(path: Path, target: Path) -> tuple[Path, int]:
    """Write the model of a checkpoint, or of the newest in a folder of them, into a file of safetensors; which
    checkpoint it was, and how many tensors.

    Read it with ``engine.load_full_state_dict(safetensors.torch.load_file(target))``.  Raises ``ConfigError`` where
    safetensors is not installed, and ``CheckpointError`` where there is no checkpoint, or one that is damaged.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError("safetensors is not installed: pip install 'pipeloom[export]'") from None
    found = [path] if is_checkpoint(path) else candidates(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}")
    manifest = Manifest.read(found[0])
    model = _model_of(found[0], manifest)
    save_file(model, target, metadata={"format": "pt", "steps": str(manifest.steps)})
    return found[0], len(model)
