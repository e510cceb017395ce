"""The transport of ranks that are threads of one process: a message is a copy from tensor to tensor."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from torch import Tensor

from pipeline.errors import ConfigError, LinkError, MessageMismatch, RankDied
from pipeline.links.local_group import LocalGroup
from pipeline.links.protocol import lane_name, not_a_peer, own_part, wait_text
from pipeline.links.threads import Ticket, World
from pipeline.switching import quick_switching
from pipeline.watch import At, Board

__all__ = ["LocalLink", "LocalTransport", "current", "run_local", "single"]

Result = TypeVar("Result")

_current: contextvars.ContextVar[LocalTransport | None] = contextvars.ContextVar("local_transport", default=None)
_PATIENCE = 5.0  # seconds for the other ranks to notice that one has failed


# -- messages ------------------------------------------------------------------------------------------------


class _Channel:
    """One lane from one rank to another: what one side has posted and the other has not met yet, in order."""

    __slots__ = ("destination", "lane", "lock", "queue", "source", "world")

    def __init__(self, world: World, source: int, destination: int, lane: int) -> None:
        self.world = world
        self.source = source
        self.destination = destination
        self.lane = lane
        self.lock = Lock()
        self.queue: deque[Ticket] = deque()  # all of one side, since whatever can meet has met

    def peer(self, rank: int) -> int:
        return self.destination if rank == self.source else self.source

    def wait_text(self, rank: int) -> str:
        return wait_text(rank == self.source, self.peer(rank), self.lane)

    def post(self, rank: int, tensor: Tensor) -> Ticket:
        """Add one side's tensor; when the other side's is there already, copy and complete both."""
        world = self.world
        if world.failure is not None:
            world.refuse_if_failed(rank)
        if not tensor.is_contiguous():
            raise LinkError(f"rank {rank} has {self.wait_text(rank)}, but the tensor is not contiguous")
        mine = Ticket(world, rank, self, tensor)
        with self.lock:
            queue = self.queue
            if queue and queue[0].done:  # it has given up, and stands there for good
                mine.complete(self._gave_up(rank, queue[0].rank))
            elif not queue or queue[0].rank == rank:
                queue.append(mine)
            else:
                self._meet(mine, queue.popleft())
        return mine

    def _gave_up(self, rank: int, who: int) -> LinkError:
        what = self.wait_text(rank)
        if who != rank:
            return RankDied(rank, who, self.lane, what)
        return LinkError(f"rank {rank} waited {what}, but can exchange nothing since it gave up an earlier wait")

    def _meet(self, mine: Ticket, other: Ticket) -> None:
        sent, posted = (mine, other) if mine.rank == self.source else (other, mine)
        message, buffer = sent.payload, posted.payload
        if message.dtype is buffer.dtype and message.numel() == buffer.numel():
            if message.shape != buffer.shape:
                message = message.view(buffer.shape)
            buffer.detach().copy_(message.detach())
            other.complete()
            mine.complete()
            return
        text = (
            f"on lane {lane_name(self.lane)} rank {self.source} sent {_form(message)}, "
            f"but rank {self.destination} had posted {_form(buffer)}"
        )
        other.complete(MessageMismatch(text))
        mine.complete(MessageMismatch(text))


def _form(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype} in shape {tuple(tensor.shape)}"


class LocalLink:
    """The Link of one rank among the threads of a process.

    With tensors on an accelerator, a message is copied on the current stream of the thread that comes last,
    so all ranks must use the same stream; they do as long as nobody chooses another.
    """

    __slots__ = ("_incoming", "_outgoing", "_world", "rank", "ranks")

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.ranks = world.ranks
        self._world = world
        self._outgoing: dict[tuple[int, int], _Channel] = {}
        self._incoming: dict[tuple[int, int], _Channel] = {}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Nothing to prepare."""

    def send(self, peer: int, tensor: Tensor, lane: int) -> Ticket:
        channel = self._outgoing.get((peer, lane))
        if channel is None:
            channel = self._outgoing[peer, lane] = self._open(self.rank, peer, lane, peer)
        return channel.post(self.rank, tensor)

    def receive(self, peer: int, buffer: Tensor, lane: int) -> Ticket:
        channel = self._incoming.get((peer, lane))
        if channel is None:
            channel = self._incoming[peer, lane] = self._open(peer, self.rank, lane, peer)
        return channel.post(self.rank, buffer)

    def _open(self, source: int, destination: int, lane: int, peer: int) -> _Channel:
        if peer == self.rank or not 0 <= peer < self.ranks:
            raise not_a_peer(self.rank, self.ranks, peer)
        key = (source, destination, lane)
        with self._world.lock:
            if key not in self._world.shared:
                self._world.shared[key] = _Channel(self._world, source, destination, lane)
            channel: _Channel = self._world.shared[key]
        return channel


# -- the ranks of a process ----------------------------------------------------------------------------------


class LocalTransport:
    """What one rank among the threads of a process reaches the others by."""

    __slots__ = ("_groups", "_world", "board", "link", "random_lock", "world")

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._groups: dict[tuple[str, tuple[int, ...]], LocalGroup] = {}
        self.link = LocalLink(world, rank)
        self.world = self.split([range(world.ranks)])
        self.board = Board(world.board_memory, rank)
        self.random_lock: Lock | None = world.random_lock if world.ranks > 1 else None

    def split(self, parts: Sequence[Sequence[int]], use: str = "") -> LocalGroup:
        key = use, own_part(parts, self.link.rank)
        if key not in self._groups:
            self._groups[key] = LocalGroup(self._world, key[1], self.link.rank, use)
        return self._groups[key]

    def aside(self) -> LocalGroup:
        return self.world  # what threads do beside training, one of them does for all


def current() -> LocalTransport | None:
    """The transport of the calling rank, inside of ``run_local``; None outside."""
    return _current.get()


def single() -> LocalTransport:
    """The transport of a world of one rank, the calling thread."""
    world = World(1)
    world.enter(0)
    return LocalTransport(world, 0)


def run_local(worker: Callable[..., Result], ranks: int, *args: object, timeout: float | None = None) -> list[Result]:
    """Call ``worker(*args)`` once for every rank, each in a thread of its own; the results in rank order.

    Inside, ``make_mesh`` and ``initialize`` find their rank by themselves.  ``timeout`` is how many seconds
    a rank may wait for another; without it any time, since ranks that all wait for each other are noticed
    at once.

    The first exception of a worker stops the other ranks' waits and is raised here.  A rank that does not
    come back by itself within seconds after that is left behind, which a note on the exception tells.
    """
    if _current.get() is not None:
        raise ConfigError("run_local was called by one of its own workers; call it outside, once, with all ranks")
    if ranks < 1:
        raise ConfigError(f"run_local runs 1 rank or more, not {ranks}")
    world = World(ranks, timeout)
    results: list[Result | None] = [None] * ranks
    over: SimpleQueue[int] = SimpleQueue()

    def run(rank: int) -> None:
        try:
            world.enter(rank)
            transport = LocalTransport(world, rank)
            _current.set(transport)
            results[rank] = worker(*args)
            transport.board.at(At.LEFT)
            world.leave(rank)
        except BaseException as error:
            world.fail(rank, error)
        finally:
            over.put(rank)

    # A context of its own for each thread: a copy of the caller's, with the rank's transport in it.
    contexts = [contextvars.copy_context() for _ in range(ranks)]
    with quick_switching():
        for rank, context in enumerate(contexts):
            Thread(target=context.run, args=(run, rank), name=f"rank {rank}", daemon=True).start()
        running = _collect(world, over)
    if world.failure is not None:
        if world.failed_rank >= 0:
            world.failure.add_note(f"raised on rank {world.failed_rank} of {ranks} in run_local")
        if running:
            world.failure.add_note(f"still running and left behind: ranks {sorted(running)}")
        raise world.failure
    return results  # type: ignore[return-value]  # every rank has returned one


def _collect(world: World, over: SimpleQueue[int]) -> set[int]:
    """Wait until every rank is over, but not for long once one has failed; the ranks that are not."""
    running = set(range(world.ranks))
    while running:
        try:
            running.remove(over.get(timeout=None if world.failure is None else _PATIENCE))
        except Empty:
            break
        except BaseException as error:  # Ctrl-C, which only this thread hears of
            world.fail(-1, error)
    return running
