"""Ranks as threads of one process: who waits for what, what ends a wait, and what a failure does to it."""

from __future__ import annotations

from threading import Lock, get_ident
from typing import Any, Protocol

from pipeline.errors import Aborted, LinkError, TransferDeadlock, TransferTimeout
from pipeline.watch import BYTES_PER_RANK

__all__ = ["Spot", "Ticket", "World"]


class Spot(Protocol):
    """Where tickets meet: one direction of a lane between two ranks, or one round of a collective."""

    @property
    def lane(self) -> int | None: ...

    def peer(self, rank: int) -> int | None:
        """The rank that this one waits for, None when it may be several."""

    def wait_text(self, rank: int) -> str:
        """What a rank waits for: completes "rank 0 waits ..."."""


class Ticket:
    """One rank's part of a transfer or a collective; whoever brings the last part completes all of them.

    ``payload`` is what the rank brought, and belongs to the world until the ticket is done.
    """

    __slots__ = ("done", "ended", "error", "payload", "rank", "signal", "spot", "world")

    def __init__(self, world: World, rank: int, spot: Spot, payload: Any) -> None:
        self.world = world
        self.rank = rank
        self.spot = spot
        self.payload = payload
        self.done = False
        self.ended: float | None = None  # of a collective
        self.error: LinkError | None = None
        self.signal: Lock | None = None

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            self.world.block(self, timeout)
        if self.error is not None:
            raise self.error

    def complete(self, error: LinkError | None = None) -> None:
        """End the wait, now or when it comes.  Called once, by the thread that brought the last part."""
        self.payload = None
        if error is not None:
            self.error = error
        self.done = True  # before looking at the signal: a waiter sets the signal before it looks at this
        if self.signal is not None:
            self.world.wake(self)


class World:
    """What the ranks of one process share.

    ``timeout`` is how many seconds a wait may take, None for any time: a state in which no rank can go on
    is noticed at once, without one.  It counts the waits of the threads that the ranks run in; a thread of
    a user's own may wait as well, but what only it would send does not keep the ranks from being found
    stuck.
    """

    def __init__(self, ranks: int, timeout: float | None = None) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.failure: BaseException | None = None
        self.failed_rank = -1
        self.board_memory = bytearray(BYTES_PER_RANK * ranks)
        self.random_lock = Lock()
        self.shared: dict[Any, Any] = {}  # channels and meetings, made by the first rank that comes to them
        self.lock = Lock()
        self._threads = [0] * ranks
        self._waiting: set[Ticket] = set()
        self._stuck: dict[int, Ticket] = {}  # of the waiting, those that hold up a rank's own thread
        self._returned: set[int] = set()

    # -- the life of a rank ----------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Make the calling thread that of a rank."""
        self._threads[rank] = get_ident()

    def leave(self, rank: int) -> None:
        """Note that a rank has returned, so that nobody waits for it for ever."""
        with self.lock:
            self._returned.add(rank)
            self._look_for_deadlock(rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """Stop every wait, now and later.  The first error is kept; what it causes elsewhere is not."""
        with self.lock:
            self._fail(rank, error)

    def refuse_if_failed(self, rank: int) -> None:
        if self.failure is not None:
            raise Aborted(rank, self.failed_rank)

    # -- waiting ---------------------------------------------------------------------------------------------

    def block(self, ticket: Ticket, timeout: float | None) -> None:
        """Wait until a ticket is done."""
        seconds = self.timeout if timeout is None else timeout
        signal = ticket.signal = Lock()
        signal.acquire()
        with self.lock:
            if ticket.done:
                return
            if self.failure is not None:
                self._end(ticket, Aborted(ticket.rank, self.failed_rank))
                return
            self._waiting.add(ticket)
            if self._threads[ticket.rank] == get_ident():
                self._stuck[ticket.rank] = ticket
                self._look_for_deadlock(ticket.rank)
        if signal.acquire(timeout=-1 if seconds is None else seconds):
            return
        with self.lock:
            if not ticket.done:
                self._forget(ticket)
                spot, rank = ticket.spot, ticket.rank
                self._end(
                    ticket,
                    TransferTimeout(rank, spot.peer(rank), spot.lane, spot.wait_text(rank), seconds or 0.0),
                )

    def wake(self, ticket: Ticket) -> None:
        with self.lock:
            if ticket in self._waiting:
                self._forget(ticket)
                _release(ticket)

    def _look_for_deadlock(self, rank: int) -> None:
        if len(self._stuck) + len(self._returned) < self.ranks or not self._stuck:
            return
        if any(ticket.done for ticket in self._stuck.values()):
            return  # a thread of the user's own is about to wake that rank
        waits = [f"rank {r} waits {self._stuck[r].spot.wait_text(r)}" for r in sorted(self._stuck)]
        waits += [f"rank {r} has returned" for r in sorted(self._returned)]
        own = self._stuck.get(rank)
        error = TransferDeadlock(waits)
        self._fail(rank, error)
        if own is not None:
            own.error = error  # raised where it was noticed, with that traceback

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure, self.failed_rank = error, rank
        for ticket in tuple(self._waiting):
            self._forget(ticket)
            self._end(ticket, Aborted(ticket.rank, self.failed_rank))
            _release(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._waiting.discard(ticket)
        if self._stuck.get(ticket.rank) is ticket:
            del self._stuck[ticket.rank]

    @staticmethod
    def _end(ticket: Ticket, error: LinkError) -> None:
        ticket.error = error
        ticket.done = True


def _release(ticket: Ticket) -> None:
    if ticket.signal is not None:
        ticket.signal.release()
