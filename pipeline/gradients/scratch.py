"""Memory that the products of weight gradients use again and again, shared by the layers of a rank."""

from __future__ import annotations

import torch
from torch import Tensor


class Ones(dict[int, Tensor]):
    """Vectors of ones by their length, to sum the rows of a matrix by a product that adds into its result."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self._like = like

    def __missing__(self, length: int) -> Tensor:
        self[length] = self._like.new_ones(length)
        return self[length]


class Scratch:
    """Buffers for casts, since a CPU has no product of mixed dtypes, and vectors of ones."""

    __slots__ = ("_buffers", "_ones")

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._ones: dict[tuple[torch.dtype, torch.device], Ones] = {}

    def cast(self, purpose: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """`source` in `dtype`: itself if it has it, else a copy, valid until the next cast for this purpose."""
        if source.dtype == dtype:
            return source
        key = (purpose, dtype, source.device)
        size = source.numel()
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=source.device)
        return buffer[:size].view(source.shape).copy_(source)

    def ones(self, like: Tensor) -> Ones:
        """Vectors of ones with the dtype and device of a tensor."""
        key = (like.dtype, like.device)
        if key not in self._ones:
            self._ones[key] = Ones(like)
        return self._ones[key]
