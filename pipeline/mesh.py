"""The grid of ranks: a data-parallel axis outside, a pipeline axis inside, and the groups along both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple

import torch

from pipeline.device import thread_device
from pipeline.errors import ConfigError, PlanMismatch, WorldSizeError
from pipeline.links import distributed, local
from pipeline.links.protocol import Group, Link, Transport
from pipeline.watch import Board

__all__ = ["DEFAULT_TIMEOUT", "Inside", "Mesh", "Traffic", "make_mesh", "pipe_size"]

DEFAULT_TIMEOUT = 300.0

Inside = Literal["pipe", "data"]
"""Which ranks lie side by side: those of a pipeline, or those that hold the same stages."""


class Traffic(NamedTuple):
    """Bytes that a rank sends in a step along both axes."""

    pipe: float
    data: float


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's place among all ranks, and its ways to the others.

    ``data`` pipelines of ``pipe`` ranks each; 2 × 4 ranks, with the pipeline ``inside`` or the replicas:

        data_rank 0    0  1  2  3      0  2  4  6      a row is a ``pipeline``,
        data_rank 1    4  5  6  7      1  3  5  7      a column are ``replicas``: they hold the same stages

    ``nodes`` has the number of the node that each rank is on; ranks side by side are on the same one, or the next.
    """

    rank: int
    size: int
    data: int
    pipe: int
    inside: Inside
    reason: str
    """Why that is inside, where it was to be chosen."""
    nodes: tuple[int, ...]
    world: Group
    pipeline: Group
    replicas: Group
    link: Link
    device: torch.device
    board: Board
    random_lock: Lock | None
    aside: Callable[[], Group]
    """The world as another group, for a thread beside the one that trains.  The first call is collective."""
    split: Callable[[Sequence[Sequence[int]], str], Group]
    """The part of the world that this rank is in, as a group for one use.  Collective over all ranks."""

    @property
    def data_rank(self) -> int:
        return self.coordinates(self.rank)[0]

    @property
    def pipe_rank(self) -> int:
        return self.coordinates(self.rank)[1]

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The pipeline that a rank is in, and its place there."""
        return divmod(rank, self.pipe) if self.inside == "pipe" else divmod(rank, self.data)[::-1]

    def world_rank(self, data_rank: int, pipe_rank: int) -> int:
        """The rank at these coordinates."""
        return data_rank * self.pipe + pipe_rank if self.inside == "pipe" else pipe_rank * self.data + data_rank

    def rows(self) -> list[list[int]]:
        """The ranks of each pipeline, in the order of its places."""
        return [[self.world_rank(data, pipe) for pipe in range(self.pipe)] for data in range(self.data)]

    def columns(self) -> list[list[int]]:
        """The ranks that hold the same stages, for each place in a pipeline."""
        return [list(column) for column in zip(*self.rows(), strict=True)]


def make_mesh(
    data_parallel: int = 1,
    *,
    inside: Inside | Literal["auto"] = "pipe",
    traffic: Callable[[int], Traffic] | None = None,
    ranks_per_node: int | None = None,
    device: str = "auto",
    link: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
) -> Mesh:
    """Arrange the ranks there are in ``data_parallel`` pipelines.  Collective over all of them.

    ``inside``: whether the ranks of a pipeline lie side by side, on one node as far as they fit there, or those that
    hold the same stages; with ``auto`` those that send each other more, by the ``traffic`` of a pipeline of so many
    ranks if it is known.
    ``ranks_per_node`` is what torchrun says unless given; threads are all on one node.

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
        node = 0
    elif distributed.available():
        transport = processes = distributed.connect(device, link, timeout)
        place, node = processes.device, distributed.node_of(processes.link.rank)
    else:
        transport, place, node = local.single(), thread_device(device, 0), 0
    if ranks_per_node is not None:
        node = transport.link.rank // ranks_per_node
    return _arrange(transport, place, data_parallel, inside, traffic, node)


def _arrange(
    transport: Transport,
    device: torch.device,
    data: int,
    wanted: Inside | Literal["auto"],
    traffic: Callable[[int], Traffic] | None,
    node: int,
) -> Mesh:
    rank, size = transport.link.rank, transport.link.ranks
    told = transport.world.all_gather_object((data, node))
    given, nodes = [number for number, _ in told], tuple(place for _, place in told)
    other = next((r for r, number in enumerate(given) if number != given[0]), None)
    if other is not None:  # before groups are made, for which ranks that divide otherwise would wait for ever
        raise PlanMismatch(
            f"ranks do not run the same thing: setting data_parallel: {given[0]} on rank 0, {given[other]} on rank "
            f"{other}; start every rank with the same code and settings"
        )
    pipe = pipe_size(size, data)
    inside, reason = _inside(wanted, data, pipe, nodes, None if traffic is None else traffic(pipe))
    pipelines, replicas = _neighbours(size, pipe), _strided(size, pipe)
    if inside == "data":
        pipelines, replicas = _strided(size, data), _neighbours(size, data)
    return Mesh(
        rank=rank,
        size=size,
        data=data,
        pipe=pipe,
        inside=inside,
        reason=reason,
        nodes=nodes,
        world=transport.world,
        pipeline=transport.split(pipelines),
        replicas=transport.split(replicas),
        link=transport.link,
        device=device,
        board=transport.board,
        random_lock=transport.random_lock,
        aside=transport.aside,
        split=transport.split,
    )


def _neighbours(size: int, length: int) -> list[range]:
    return [range(first, first + length) for first in range(0, size, length)]


def _strided(size: int, step: int) -> list[range]:
    return [range(first, size, step) for first in range(step)]


def _inside(
    wanted: Inside | Literal["auto"], data: int, pipe: int, nodes: Sequence[int], traffic: Traffic | None
) -> tuple[Inside, str]:
    """What lies side by side, and why."""
    if wanted != "auto":
        return wanted, ""
    if data == 1 or pipe == 1 or len(set(nodes)) == 1:
        return "pipe", ""
    if traffic is None:
        return "data", (
            "mesh: ranks that hold the same stages lie side by side, since gradients and parameters usually are more "
            "than activations; a saved profile would tell"
        )
    inside: Inside = "data" if traffic.data > traffic.pipe else "pipe"
    who = "ranks that hold the same stages" if inside == "data" else "ranks of a pipeline"
    return inside, (
        f"mesh: {who} lie side by side, since a rank sends {traffic.data / 2**20:,.1f} MiB of gradients and parameters "
        f"a step and {traffic.pipe / 2**20:,.1f} MiB of activations"
    )


def pipe_size(size: int, data: int) -> int:
    """The ranks of each of ``data`` pipelines.  Raises ``WorldSizeError`` where ``size`` ranks cannot form them."""
    if size % data:
        raise WorldSizeError(_misfit(size, data))
    return size // data


def _misfit(size: int, data: int) -> str:
    divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
    less = size - size % data
    return (
        f"{size} rank{'s' if size > 1 else ''} cannot form {data} pipelines of equal length: set data_parallel to "
        f"{' or '.join(divisors)}, or start {f'{less} or ' if less else ''}{less + data} ranks"
    )
