"""Collectives in three steps: inside of each node, between nodes on the parts, and inside again."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pipeline.comm.behind import Behind
from pipeline.links.protocol import DONE, Collective, Group

__all__ = ["HierarchicalExchange"]


class HierarchicalExchange:
    """The Exchange of one rank over n nodes with k members each.

    A ring over all members sends 2(nk - 1)/nk of a vector over each node's link when it sums; of k parts, each summed
    between nodes by another member, it is 2(n - 1)/n (Cho et al., "BlueConnect", MLSys 2019).  For two nodes of two it
    is two thirds.

    ``inner`` are the members of this rank's node, ``outer`` those of all nodes with the same place in theirs; both are
    used by nobody else, since what is started with ``async_op`` runs ``behind``.
    """

    __slots__ = ("_behind", "_inner", "_outer", "rank", "ranks")

    def __init__(self, whole: Group, inner: Group, outer: Group, behind: Behind) -> None:
        self.ranks = whole.ranks
        self.rank = whole.rank
        self._inner = inner
        self._outer = outer
        self._behind = behind

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Collective:
        return self._run(partial(self._all_reduce, tensor), async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        return self._run(partial(self._reduce_scatter, output, input), async_op)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        return self._run(partial(self._all_gather, output, input), async_op)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._run(partial(self._broadcast, tensor, source), False)

    def _run(self, work: partial[None], async_op: bool) -> Collective:
        """Always in the order of calls, so that a call that waits does not overtake one that has been started."""
        pending = self._behind.start(work)
        if async_op:
            return pending
        pending.wait()
        return DONE

    # The parts of a whole lie in the order of members: node by node, and in each place by place.

    def _all_reduce(self, tensor: Tensor) -> None:
        places = len(self._inner.ranks)
        length = -(-tensor.numel() // places)
        whole = tensor.reshape(-1)
        if length * places != whole.numel():
            whole = torch.cat([whole, whole.new_zeros(length * places - whole.numel())])
        part = whole.new_empty(length)
        self._inner.reduce_scatter(part, whole, async_op=True).wait()
        self._outer.all_reduce(part, async_op=True).wait()
        self._inner.all_gather_into(whole, part, async_op=True).wait()
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole[: tensor.numel()].view_as(tensor))

    def _reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        nodes, places = len(self._outer.ranks), len(self._inner.ranks)
        by_place = input.view(nodes, places, -1).transpose(0, 1).reshape(-1)
        part = input.new_empty(nodes * output.numel())
        self._inner.reduce_scatter(part, by_place, async_op=True).wait()
        self._outer.reduce_scatter(output, part, async_op=True).wait()

    def _all_gather(self, output: Tensor, input: Tensor) -> None:
        nodes, places = len(self._outer.ranks), len(self._inner.ranks)
        part = input.new_empty(nodes * input.numel())
        self._outer.all_gather_into(part, input, async_op=True).wait()
        by_place = torch.empty_like(output)
        self._inner.all_gather_into(by_place, part, async_op=True).wait()
        output.view(nodes, places, -1).copy_(by_place.view(places, nodes, -1).transpose(0, 1))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        node, place = divmod(source, len(self._inner.ranks))
        if self._inner.rank == place:
            self._outer.broadcast(tensor, node)
        self._inner.broadcast(tensor, place)
