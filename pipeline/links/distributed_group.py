"""Collectives of ranks that are processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.device import on_host
from pipeline.errors import LinkError
from pipeline.links.distributed_link import translated
from pipeline.links.protocol import DONE, Collective

__all__ = ["DistributedGroup"]


class DistributedGroup:
    """The Group of one process.

    Tensors are exchanged by the backend of the device they are on.  ``started`` is where it notes
    collectives that have been started and not waited for.
    """

    __slots__ = ("_started", "_timeout", "_world_rank", "process_group", "rank", "ranks")

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        world_rank: int,
        timeout: float,
        started: set[object],
    ) -> None:
        self.process_group = group
        self.ranks = ranks
        self.rank = ranks.index(world_rank)
        self._timeout = timeout
        self._world_rank = world_rank
        self._started = started

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Collective:
        return self._start("all_reduce", async_op, dist.all_reduce, tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        return self._start("reduce_scatter", async_op, dist.reduce_scatter_single, output, input)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        return self._start("all_gather_into", async_op, dist.all_gather_single, output, input)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._start("broadcast", False, dist.broadcast, tensor, group_src=source)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(tensor, requires_grad=False) for _ in self.ranks]
        self._start("all_gather", False, dist.all_gather, outputs, tensor)
        return outputs

    def all_gather_object(self, obj: Any) -> list[Any]:
        objects: list[Any] = [None] * len(self.ranks)
        self._run("all_gather_object", dist.all_gather_object, objects, obj)
        return objects

    def broadcast_object(self, obj: Any, source: int) -> Any:
        objects = [obj if self.rank == source else None]
        self._run("broadcast_object", dist.broadcast_object_list, objects, group_src=source)
        return objects[0]

    def barrier(self) -> None:
        # Not the backend's own, which on an accelerator would wait for everything that is queued there.
        self.all_reduce(torch.zeros(1, dtype=torch.uint8))  # whatever the default type of either rank is

    def _start(
        self, call: str, async_op: bool, function: Callable[..., Any], *tensors: Any, **options: Any
    ) -> Collective:
        work = self._run(call, function, *tensors, async_op=True, **options)
        pending = _Collective(work, self, call, on_host(tensors[-1]), self._started)
        if async_op:
            pending.note_end()
            self._started.add(pending)
            return pending
        pending.wait()
        return DONE

    def _run(self, call: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, group=self.process_group, **options)
        except RuntimeError as error:
            raise self.failure(error, call) from None

    def failure(self, error: RuntimeError, call: str, timeout: float | None = None) -> LinkError:
        """What an error of the backend means."""
        what, seconds = f"in {call} over ranks {self.ranks}", self._timeout if timeout is None else timeout
        return translated(error, self._world_rank, None, None, what, seconds)


class _Collective:
    """A collective under way."""

    __slots__ = ("_call", "_group", "_on_host", "_started", "_work", "ended")

    def __init__(
        self, work: dist.Work, group: DistributedGroup, call: str, on_host: bool, started: set[object]
    ) -> None:
        self._work: dist.Work | None = work
        self._group = group
        self._call = call
        self._on_host = on_host
        self._started = started
        self.ended: float | None = None

    def note_end(self) -> None:
        """Write down when it ends, by the backend's own thread, where the backend tells."""
        if self._work is not None and self._on_host:
            with suppress(RuntimeError):  # gloo has it for sums only
                self._work.get_future().add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self.ended = time.perf_counter()

    def wait(self, timeout: float | None = None) -> None:
        if self._work is None:
            return
        try:
            if timeout is None or not self._on_host:  # with a timeout the host would wait for an accelerator
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._group.failure(error, self._call, timeout) from None
        self._started.discard(self)
        self._work = None
