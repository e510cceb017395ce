"""Sums of gradients over a slow link, in fewer bytes than they have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pipeline.comm.behind import Behind
from pipeline.links.protocol import Collective, Exchange

__all__ = ["Bf16", "Compressor", "Method", "PowerSGD", "TopK"]

Shapes = Sequence[tuple[int, torch.Size]]
"""Where each parameter starts in the vector, and its shape."""


class Method(Protocol):
    def sum(self, vector: Tensor, rest: Tensor | None, exchange: Exchange) -> None:
        """Replace a vector, in place, by what is about its sum over the members, the same on each; and ``rest`` by what
        of this member's own is not in it."""

    def forget(self) -> None:
        """Be as new."""


class Compressor:
    """Sums one vector by a method, step after step.

    With ``feedback``, what one step leaves out is added to the gradients of the next (Seide et al., "1-Bit SGD", 2014;
    Karimireddy et al., "Error Feedback Fixes SignSGD", 2019).  It takes as much memory as the vector.  What a step has
    left out that is not applied, or when the vector moves to another rank or into a checkpoint, is forgotten.  The
    first ``exact`` sums are as they should be: gradients change most then.
    """

    __slots__ = ("_behind", "_exact", "_exchange", "_method", "rest")

    def __init__(
        self, method: Method, like: Tensor, exchange: Exchange, behind: Behind, *, feedback: bool, exact: int = 0
    ) -> None:
        self._method = method
        self._exchange = exchange
        self._behind = behind
        self._exact = exact
        self.rest = torch.zeros_like(like) if feedback else None

    def start(self, vector: Tensor) -> Collective:
        """Start to sum the vector in place.  Collective over the exchange's members."""
        return self._behind.start(partial(self._sum, vector))

    def _sum(self, vector: Tensor) -> None:
        if self._exact > 0:
            self._exact -= 1
            self._exchange.all_reduce(vector, async_op=True).wait()
            return
        if self.rest is not None:
            vector.add_(self.rest)
        self._method.sum(vector, self.rest, self._exchange)

    def forget(self) -> None:
        """Leave out nothing of the steps that have been."""
        if self.rest is not None:
            self.rest.zero_()
        self._method.forget()


class Bf16:
    """Half the bytes of fp32: summed in bf16."""

    __slots__ = ()

    def sum(self, vector: Tensor, rest: Tensor | None, exchange: Exchange) -> None:
        narrow = vector.bfloat16()
        if rest is not None:
            torch.sub(vector, narrow, out=rest)
        exchange.all_reduce(narrow, async_op=True).wait()
        vector.copy_(narrow)

    def forget(self) -> None:
        pass


class TopK:
    """The largest elements of each member, with their places (Aji and Heafield, "Sparse Communication for Distributed
    Gradient Descent", EMNLP 2017): ``share`` of them, at least one."""

    __slots__ = ("_share",)

    def __init__(self, share: float) -> None:
        self._share = share

    def sum(self, vector: Tensor, rest: Tensor | None, exchange: Exchange) -> None:
        count, members = max(1, math.ceil(self._share * vector.numel())), len(exchange.ranks)
        places = vector.abs().topk(count, sorted=False).indices
        values = vector[places]
        if rest is not None:
            rest.copy_(vector).index_fill_(0, places, 0)
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[vector.element_size()]
        sent = torch.cat([values.view(integers), places.to(integers)])  # as wide, in one message
        found = sent.new_empty(members * sent.numel())
        exchange.all_gather_into(found, sent, async_op=True).wait()
        vector.zero_()
        for values_of, places_of in found.view(members, 2, count):  # in the order of members, on each of them
            vector.index_add_(0, places_of.long(), values_of.view(vector.dtype))

    def forget(self) -> None:
        pass


class PowerSGD:
    """Each matrix as a product of two thin ones, found by one round of power iteration from those of the step before
    (Vogels et al., "PowerSGD", NeurIPS 2019, Algorithm 1); what is no matrix, or would not be smaller, is sent whole.
    """

    __slots__ = ("_matrices", "_others", "_rank", "_right")

    def __init__(self, rank: int, shapes: Shapes) -> None:
        self._rank = rank
        self._matrices: list[tuple[slice, int, int]] = []
        self._others: list[slice] = []
        for start, shape in shapes:
            rows = shape[0] if shape else 1
            columns = shape.numel() // rows if rows else 0
            part = slice(start, start + shape.numel())
            if self._width(rows, columns) * (rows + columns) < shape.numel():
                self._matrices.append((part, rows, columns))
            elif shape.numel():
                self._others.append(part)
        self._right: list[Tensor] = []

    def _width(self, rows: int, columns: int) -> int:
        return min(self._rank, rows, columns)

    def sum(self, vector: Tensor, rest: Tensor | None, exchange: Exchange) -> None:
        matrices = [vector[part].view(rows, columns) for part, rows, columns in self._matrices]
        right = self._right or self._first(vector)
        others = [vector[part] for part in self._others]
        left, whole = _apart(_summed([*map(torch.mm, matrices, right), *others], exchange), len(matrices))
        left = [torch.linalg.qr(product).Q for product in left]
        own = [matrix.t() @ base for matrix, base in zip(matrices, left, strict=True)]
        if rest is not None:
            rest.zero_()
            for (part, rows, columns), matrix, base, seen in zip(self._matrices, matrices, left, own, strict=True):
                torch.sub(matrix, base @ seen.t(), out=rest[part].view(rows, columns))
        self._right = _summed(own, exchange) if own else []
        for matrix, base, seen in zip(matrices, left, self._right, strict=True):
            torch.mm(base, seen.t(), out=matrix)
        for other, total in zip(others, whole, strict=True):
            other.copy_(total)

    def forget(self) -> None:
        self._right = []

    def _first(self, vector: Tensor) -> list[Tensor]:
        """The same on every member, whatever has been drawn before."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(columns, self._width(rows, columns), generator=generator).to(vector)
            for _, rows, columns in self._matrices
        ]


def _apart(tensors: list[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
    return tensors[:count], tensors[count:]


def _summed(tensors: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """The sums of several tensors, in one message."""
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    exchange.all_reduce(together, async_op=True).wait()
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
