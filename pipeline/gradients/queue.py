"""The weight gradients of one use of a layer by one micro-batch that are still to be computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

Work = tuple[Callable[[Tensor, Tensor, Tensor, Any], None], Tensor, Tensor, Tensor, Any]
"""(operation, gradient view, saved input, gradient of the output, details): `operation(*rest)` adds into the view."""


class WeightGradQueue:
    """Bound into the graph by forward, filled by I and emptied by W; in a full B it stays empty.

    The split operators hand their work over only while the queue is open, that is while the engine's own backward
    runs; any other differentiation (`torch.autograd.grad` in a layer's forward) gets ordinary gradients.

        with queue.opened(inline=False):        # I; inline=True: a full B, every product at once while dY is hot
            torch.autograd.backward(outputs, gradients)
        queue.drain()                           # W
    """

    __slots__ = ("inline", "is_open", "work")

    def __init__(self) -> None:
        self.work: deque[Work] = deque()
        self.is_open = False
        self.inline = False

    def opened(self, *, inline: bool = False) -> WeightGradQueue:
        """The queue as a context, open until its end; `inline`: run the work at once instead of keeping it."""
        self.inline = inline
        return self

    def __enter__(self) -> WeightGradQueue:
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False

    def __len__(self) -> int:
        return len(self.work)

    @property
    def nbytes(self) -> int:
        """Bytes that the waiting work keeps alive, a storage that serves several entries counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for entry in self.work
            for tensor in entry[2:4]
        }
        return sum(storages.values())

    def drain(self) -> None:
        """Add every waiting gradient into its view, first in first out; each entry is released when it is done."""
        take = self.work.popleft
        while self.work:
            operation, gradient, saved, incoming, details = take()
            operation(gradient, saved, incoming, details)

    def clear(self) -> None:
        """Drop the waiting work, after a step that failed."""
        self.work.clear()
