"""One vector on one data-parallel rank: the part that its optimizer updates, and how the whole comes and goes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from pipeline.comm.compress import Compressor
from pipeline.comm.ways import Ways
from pipeline.gradients.flat import FlatVector
from pipeline.links.protocol import Collective

__all__ = ["Shard"]


class Shard:
    """A rank's part of a layer's vector, elements ``start`` to ``stop``; with ZeRO 0 that is all of it.

    The optimizer steps on ``trained``: the part itself, or with ``master`` and parameters of 16 bits, of which one step
    may be too small to change any, a copy of it in fp32.

    A layer's tensors are views of the whole vector for life.  Where it is whole only while it is used, its memory
    alone goes and comes back: views, what autograd has saved, and versions stay what they are.
    """

    __slots__ = ("_arriving", "_has_master", "_stays", "_summing", "_total", "_users", "arrived_at", "compressor",
                 "gradients", "parameters", "start", "stop", "summed_at", "trained", "vector", "ways", "whole",
                 "zero")  # fmt: skip

    def __init__(
        self,
        vector: FlatVector,
        ways: Ways,
        zero: int,
        *,
        master: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        parts, rank = (len(ways.parameters.ranks), ways.parameters.rank) if zero else (1, 0)
        length = vector.parameters.numel() // parts
        self.vector = vector
        self.zero = zero
        self.start, self.stop = rank * length, (rank + 1) * length
        self.whole = True
        """Whether the vector's parameters are those of all ranks, or on their way."""
        own = slice(self.start, self.stop)
        # Of a vector without memory, all of whose values are another layer's, only the gradients are of use.
        borrowed = not vector.parameters.untyped_storage().nbytes()
        self._stays = zero == 0 or borrowed
        self.parameters = vector.parameters
        if zero and not self._stays:
            self.parameters = vector.parameters[own] if zero < 3 else vector.parameters[own].clone()
        narrow = vector.parameters.dtype in (torch.bfloat16, torch.float16)
        self._has_master = master and narrow and not borrowed and vector.gradients.numel() > 0
        self.trained = self.parameters.float() if self._has_master else self.parameters
        self.gradients = vector.gradients[own] if zero < 2 else torch.zeros_like(vector.gradients[own])
        self.compressor = compressor
        """What sums the gradients instead, where they are compressed."""
        self.ways = ways
        self.arrived_at = self.summed_at = 0.0
        """When the parameters were last made whole, and the gradients summed, by ``time.perf_counter``; where nobody
        can tell, when that was waited for."""
        self._users = 0
        self._arriving: Collective | None = None
        self._summing: Collective | None = None
        self._total: Tensor | None = None
        if zero >= 2:
            _drop(vector.gradients)
        if zero >= 3:
            self._drop_parameters()

    # -- parameters ------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start to make the parameters whole, unless they are.  Collective over replicas; ``ready`` completes it."""
        self._users += self.zero >= 3
        if self.whole:
            return
        self.whole = True
        _restore(self.vector.parameters)
        self._arriving = self.ways.parameters.all_gather_into(self.vector.parameters, self.parameters, async_op=True)

    def ready(self) -> None:
        """Wait until the parameters are whole."""
        if self._arriving is not None:
            self._arriving.wait()
            self.arrived_at = self._arriving.ended or time.perf_counter()
            self._arriving = None

    def release(self) -> None:
        """Undo one ``gather``; ZeRO 3 drops the whole with the last of them."""
        self._users -= self.zero >= 3
        if self.zero >= 3 and not self._users:
            self._drop_parameters()

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer has changed this rank's part, and the others theirs."""
        if self._has_master:
            self.parameters.copy_(self.trained)
        self.whole &= self._stays or not self.vector.gradients.numel()

    @torch.no_grad()
    def take_from_whole(self) -> None:
        """The whole has been changed on every rank alike: make the part the same."""
        if self.zero >= 3 and not self._stays:
            self.parameters.copy_(self.vector.parameters[self.start : self.stop])
        if self._has_master:
            self.trained.copy_(self.parameters)

    def _drop_parameters(self) -> None:
        if not self._stays:
            _drop(self.vector.parameters)
            self.whole = False

    # -- gradients -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Have the whole gradient, all 0 where it is not there."""
        if self.zero >= 2 and _restore(self.vector.gradients):
            self.vector.gradients.zero_()

    def drop_gradients(self) -> None:
        """Let go of the whole gradient, to which nothing has been added."""
        if self.zero >= 2:
            _drop(self.vector.gradients)

    def reduce(self) -> None:
        """Start to sum the whole gradients into the parts.  Collective over replicas; ``reduced`` completes it."""
        whole = self.vector.gradients
        if not whole.numel():
            return
        if self.compressor is not None:
            self._summing = self.compressor.start(whole)
            return
        if self.zero == 0:
            self._summing = self.ways.gradients.all_reduce(whole, async_op=True)
            return
        self.open()
        self._total = self.gradients if self.zero == 1 else torch.empty_like(self.gradients)
        self._summing = self.ways.gradients.reduce_scatter(self._total, whole, async_op=True)

    def reduced(self) -> None:
        """Wait until this rank's part of the gradient is the sum; with ZeRO 2 the whole is then no longer there."""
        if self._summing is None:
            return
        self._summing.wait()
        self.summed_at = self._summing.ended or time.perf_counter()
        self._summing = None
        if self.zero >= 2 and self._total is not None:
            self.gradients.add_(self._total)
            _drop(self.vector.gradients)
        self._total = None

    def forget_step(self) -> None:
        """The step's gradients are not applied."""
        if self.compressor is not None:
            self.compressor.forget()

    def zero_gradients(self) -> None:
        """Set this rank's part of the gradient to 0, beside the whole one, which ZeRO 2 drops."""
        if self.zero >= 2:
            self.gradients.zero_()
            _drop(self.vector.gradients)


def _drop(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _restore(tensor: Tensor) -> bool:
    """Give a vector its memory, of any contents; False where it had it."""
    storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        return False
    storage.resize_(tensor.nbytes)
    return True
