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
from pipeline.saving.manifest import MANIFEST, Manifest, misfit_of_file

__all__ = ["export", "model_of"]


def model_of(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers in a checkpoint, or in the newest of a folder of checkpoints, as ``full_state_dict`` names
    them; parameters that layers share have one entry, under the first layer.

    Raises ``CheckpointError`` where there is none, or one that is damaged.
    """
    path = _newest(path)
    manifest = Manifest.read(path)
    wrong = (misfit_of_file(path / name, whole) for name, whole in manifest.files.items())
    problem = next((text for text in wrong if text), "")
    if problem:
        raise CheckpointError(f"{path} is damaged: {problem}")
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
    """Write the model of a checkpoint into a file of safetensors; which checkpoint it was, and how many tensors.

    Read it with ``engine.load_full_state_dict(safetensors.torch.load_file(target))``.  Raises ``ConfigError`` where
    safetensors is not installed, and what ``model_of`` raises.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError("safetensors is not installed: pip install 'pipeloom[export]'") from None
    path = _newest(path)
    model = model_of(path)
    save_file(model, target, metadata={"format": "pt", "steps": str(Manifest.read(path).steps)})
    return path, len(model)


def _newest(path: Path) -> Path:
    if (path / MANIFEST).is_file() or path.name.startswith("step-"):
        return path
    found = candidates(path)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found[0]
