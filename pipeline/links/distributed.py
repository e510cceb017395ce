"""The transport of ranks that are processes: torch.distributed, its process group made and unmade here."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.device import backend_of, bound, process_device, uses_streams
from pipeline.errors import ConfigError
from pipeline.links import shared_link
from pipeline.links.distributed_group import DistributedGroup
from pipeline.links.distributed_link import PairLink, TaggedLink
from pipeline.links.host_memory import shared_bytes
from pipeline.links.local_group import alone
from pipeline.links.protocol import Group, own_part
from pipeline.links.relay import relay_between_hosts
from pipeline.links.rendezvous import meet, shared_store
from pipeline.links.shared_link import SharedLink
from pipeline.watch import BYTES_PER_RANK, At, Board

if TYPE_CHECKING:
    from pipeline.mesh import Mesh

__all__ = ["DistributedTransport", "available", "connect", "device_mesh", "node_of"]

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# A process has one default process group, and making groups costs milliseconds, threads and sockets: what was
# made for it is used again, as long as it is there.
_connected: list[DistributedTransport] = []


def available() -> bool:
    """Whether this process is one of several: a process group exists, or a launcher's environment does."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return True
    return all(name in os.environ for name in _ENVIRONMENT) and os.environ["WORLD_SIZE"] != "1"


def connect(device: str, link: str, timeout: float) -> DistributedTransport:
    """This process's transport.  Collective over all processes.

    The default process group is made if there is none, and unmade when the process ends.  ``device`` is
    auto, cpu or cuda, ``link`` is auto, shm or gloo; ``timeout`` is how many seconds a wait for another rank may take.
    """
    kind = _kind_of_link(link)
    place, fresh = _initialize(device, timeout)
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    for transport in tuple(_connected):
        if transport.process_group is not group:
            _connected.remove(transport)
        elif (transport.device, transport.kind, transport.timeout) == (place, kind, timeout):
            return transport
    if not _connected:
        atexit.register(_leave)
    transport = DistributedTransport(group, fresh, place, kind, timeout)
    _connected.append(transport)
    return transport


def node_of(rank: int) -> int:
    """The number of the node that this process is on, as its launcher says; 0 where that says nothing."""
    if "GROUP_RANK" in os.environ:
        return int(os.environ["GROUP_RANK"])
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _kind_of_link(wanted: str) -> str:
    """shm or gloo."""
    if wanted not in ("auto", "shm", "gloo"):
        raise ConfigError(f"link is {wanted!r}; it must be one of auto, shm, gloo")
    possible = shared_link.is_possible()
    if wanted == "shm" and not possible:
        raise ConfigError("link is 'shm', which needs Linux on an x86-64 processor; set link to auto or gloo")
    return "shm" if possible and wanted != "gloo" else "gloo"


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's own view of the mesh, with groups of its own, for libraries that ask for one.  Collective."""
    if mesh.inside == "pipe":
        return init_device_mesh(mesh.device.type, (mesh.data, mesh.pipe), mesh_dim_names=("data", "pipe"))
    return init_device_mesh(mesh.device.type, (mesh.pipe, mesh.data), mesh_dim_names=("pipe", "data"))


def _initialize(wanted: str, timeout: float) -> tuple[torch.device, bool]:
    """The device of this rank, and whether the default process group was made here, where there was none."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    if dist.is_initialized():
        return process_device(wanted, local_rank, dist.get_backend_config()), False
    device = process_device(wanted, local_rank)
    limit = timedelta(seconds=timeout)
    store, rank, size = meet(timeout) if shared_store() else (None, -1, -1)  # as the environment says
    dist.init_process_group(
        backend_of(device), timeout=limit, store=store, rank=rank, world_size=size, device_id=bound(device)
    )
    return device, True


def _leave() -> None:
    """Unmake the groups while the interpreter is whole; without it a process can die in a thread of theirs.

    A collective that some rank never joined keeps the process from ending until its timeout, since the
    backend waits for its own threads.  Only a process that is failing has one, and it must end now: as long
    as it lives, its peers wait for it.
    """
    for transport in _connected:
        transport.board.at(At.LEFT)
        if transport.relay is not None:
            transport.relay.stop()
    if any(transport.started for transport in _connected):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    for transport in _connected:
        transport.let_go()
    _connected.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


class DistributedTransport:
    """One process's access to the others.

    A default group that somebody else has made is left to them: it may have another timeout, and messages of
    their own.  ``started`` are collectives that have not been waited for.
    """

    __slots__ = (
        "_aside",
        "_groups",
        "board",
        "device",
        "kind",
        "link",
        "process_group",
        "random_lock",
        "relay",
        "started",
        "timeout",
        "world",
    )

    def __init__(
        self, default: dist.ProcessGroup, fresh: bool, device: torch.device, kind: str, timeout: float
    ) -> None:
        self.device = device
        self.kind = kind
        self.timeout = timeout
        self.process_group = default
        self.random_lock = None
        self.started: set[object] = set()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        everyone = tuple(range(ranks))
        world = default if fresh else self._new_group(everyone)
        self.world = self._group(world, everyone)
        self._groups: dict[tuple[str, tuple[tuple[int, ...], ...]], Group] = {("", (everyone,)): self.world}
        self._aside: DistributedGroup | None = None
        tagged = TaggedLink(world, rank, ranks, timeout)
        self.board = Board(shared_bytes(self.world, BYTES_PER_RANK * ranks), rank)
        hosts = self._hosts()
        self.link: TaggedLink | PairLink | SharedLink = tagged
        if uses_streams(device):
            self.link = PairLink(tagged, device)
        elif kind == "shm":
            self.link = SharedLink(tagged, self.world, next(host for host in hosts if rank in host))
        self.relay = relay_between_hosts(self.board, hosts, world.get_group_store())

    def _hosts(self) -> list[tuple[int, ...]]:
        """The ranks of each host: those that see each other on its board."""
        self.world.barrier()  # all have written there
        seen = tuple(rank for rank in self.world.ranks if self.board.state(rank).process)
        return sorted(set(self.world.all_gather_object(seen)))

    def split(self, parts: Sequence[Sequence[int]], use: str = "") -> Group:
        key = use, tuple(tuple(part) for part in parts)
        if key not in self._groups:  # on every rank alike, as all have split alike
            own = own_part(key[1], self.link.rank)
            made = {part: self._new_group(part) for part in key[1] if len(part) > 1}
            self._groups[key] = self._group(made[own], own) if own in made else alone(own)
        return self._groups[key]

    def aside(self) -> Group:
        if self._aside is None:
            limit = timedelta(seconds=self.timeout)
            group = dist.new_group(list(self.world.ranks), backend="gloo", timeout=limit)
            self._aside = self._group(cast(dist.ProcessGroup, group), self.world.ranks)
        return self._aside

    def let_go(self) -> None:
        """Drop every torch group, which an engine that still stands somewhere would keep from ending its threads."""
        for group in (*self._groups.values(), self._aside):
            if isinstance(group, DistributedGroup):
                del group.process_group
        self.link.let_go()
        del self.process_group

    def _group(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> DistributedGroup:
        return DistributedGroup(group, ranks, dist.get_rank(), self.timeout, self.started)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        return cast(
            dist.ProcessGroup,
            dist.new_group(
                list(ranks),
                backend=backend_of(self.device),
                timeout=timedelta(seconds=self.timeout),
                device_id=bound(self.device),
            ),
        )
