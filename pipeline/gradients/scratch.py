"""Memory for casts that is kept and reused, since a CPU has no product of mixed dtypes."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One growing buffer for each (purpose, dtype, device); shared by all layers of a rank."""

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def cast(self, purpose: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """`source` in `dtype`: itself if it has it, else a copy that is valid until the next cast for this purpose."""
        if source.dtype == dtype:
            return source
        key = (purpose, dtype, source.device)
        size = source.numel()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=source.device)
        return buffer[:size].view(source.shape).copy_(source)
