"""What a rank sends in the collectives of its replicas, counted where they are called."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor

from pipeline.runner import Runner


class Counted:
    """While open, collectives over the replicas of a stage are counted: ``elements`` are those that this rank sends.

    A ring sends of n elements n(d - 1)/d to sum parts or to join them, and twice that to sum the whole.
    """

    def __init__(self, runner: Runner) -> None:
        self.elements = 0.0
        self._shards = [shard for shards in runner.built.shards.values() for shard in shards]
        self._ways = self._shards[0].ways
        self._group = self._ways.gradients

    def __enter__(self) -> Counted:
        for shard in self._shards:
            shard.ways = replace(self._ways, gradients=self, parameters=self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._shards:
            shard.ways = self._ways

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    @property
    def rank(self) -> int:
        return self._group.rank

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Any:
        self._count(2 * tensor.numel())
        return self._group.all_reduce(tensor, async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, async_op: bool = False) -> Any:
        self._count(input.numel())
        return self._group.reduce_scatter(output, input, async_op)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool = False) -> Any:
        self._count(output.numel())
        return self._group.all_gather_into(output, input, async_op)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._group.broadcast(tensor, source)

    def _count(self, elements: int) -> None:
        ranks = len(self._group.ranks)
        self.elements += elements * (ranks - 1) / ranks
