"""Memory that the products of weight gradients use again and again, shared by the layers of a rank."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Buffers for casts, since a CPU has no product of mixed dtypes, and vectors of ones."""

    __slots__ = ("_buffers", "_ones")

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._ones: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

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

    def ones(self, like: Tensor, length: int) -> Tensor:
        """A vector of ones, to sum the rows of a matrix by a product that adds into its result."""
        key = (length, like.dtype, like.device)
        ones = self._ones.get(key)
        if ones is None:
            ones = self._ones[key] = like.new_ones(length)
        return ones
