"""The grid of ranks: a data-parallel axis outside, a pipeline axis inside, and the groups along both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch

from pipeline.device import thread_device
from pipeline.errors import ConfigError, PlanMismatch, WorldSizeError
from pipeline.links import distributed, local
from pipeline.links.protocol import Group, Link, Transport
from pipeline.watch import Board

__all__ = ["DEFAULT_TIMEOUT", "Mesh", "make_mesh"]

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's place among all ranks, and its ways to the others.

    ``data`` pipelines of ``pipe`` ranks each; with 2 × 4, ranks 0 to 3 are the first pipeline:

        data_rank 0    0  1  2  3      a row is a ``pipeline``,
        data_rank 1    4  5  6  7      a column are ``replicas``: they hold the same stages
    """

    rank: int
    size: int
    data: int
    pipe: int
    world: Group
    pipeline: Group
    replicas: Group
    link: Link
    device: torch.device
    board: Board
    random_lock: Lock | None
    aside: Callable[[], Group]
    """The world as another group, for a thread beside the one that trains.  The first call is collective."""

    @property
    def data_rank(self) -> int:
        return self.rank // self.pipe

    @property
    def pipe_rank(self) -> int:
        return self.rank % self.pipe

    def world_rank(self, data_rank: int, pipe_rank: int) -> int:
        """The rank at these coordinates."""
        return data_rank * self.pipe + pipe_rank


def make_mesh(
    data_parallel: int = 1, *, device: str = "auto", link: str = "auto", timeout: float = DEFAULT_TIMEOUT
) -> Mesh:
    """Arrange the ranks there are in ``data_parallel`` pipelines.  Collective over all of them.

    Inside of ``run_local`` the ranks are its threads.  Else, when torchrun has started this process or a
    process group exists, they are processes; the group is made here, and unmade at exit, if there is none.
    Else there is one rank.

    ``device`` is auto, cpu or cuda; ``link`` is auto, shm or gloo, and says how small messages in host memory go
    between processes of one host.  ``timeout`` is how many seconds one process waits for another in a
    transfer or collective; threads have the timeout of ``run_local``.

    Raises ``WorldSizeError`` when ``data_parallel`` does not divide the number of ranks, ``ConfigError`` for a
    device or link that is not to be had here, and ``PlanMismatch`` when ranks give different ones.
    """
    if data_parallel < 1:
        raise ConfigError(f"data_parallel is {data_parallel}; it must be 1 or more")
    transport: Transport
    threads = local.current()
    if threads is not None:
        transport, place = threads, thread_device(device, threads.link.rank)
    elif distributed.available():
        transport = processes = distributed.connect(device, link, timeout)
        place = processes.device
    else:
        transport, place = local.single(), thread_device(device, 0)
    return _arrange(transport, place, data_parallel)


def _arrange(transport: Transport, device: torch.device, data: int) -> Mesh:
    rank, size = transport.link.rank, transport.link.ranks
    given = transport.world.all_gather_object(data)
    other = next((r for r, number in enumerate(given) if number != given[0]), None)
    if other is not None:  # before groups are made, for which ranks that divide otherwise would wait for ever
        raise PlanMismatch(
            f"ranks do not run the same thing: setting data_parallel: {given[0]} on rank 0, {given[other]} on rank "
            f"{other}; start every rank with the same code and settings"
        )
    if size % data:
        raise WorldSizeError(_misfit(size, data))
    pipe = size // data
    pipelines = [range(first, first + pipe) for first in range(0, size, pipe)]
    replicas = [range(first, size, pipe) for first in range(pipe)]
    return Mesh(
        rank=rank,
        size=size,
        data=data,
        pipe=pipe,
        world=transport.world,
        pipeline=transport.split(pipelines),
        replicas=transport.split(replicas),
        link=transport.link,
        device=device,
        board=transport.board,
        random_lock=transport.random_lock,
        aside=transport.aside,
    )


def _misfit(size: int, data: int) -> str:
    divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
    less = size - size % data
    return (
        f"{size} rank{'s' if size > 1 else ''} cannot form {data} pipelines of equal length: set data_parallel to "
        f"{' or '.join(divisors)}, or start {f'{less} or ' if less else ''}{less + data} ranks"
    )
