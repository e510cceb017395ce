"""What the engine asks of a transport: messages between ranks, and collectives over groups of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, Protocol

from torch import Tensor

from pipeline.errors import LinkError
from pipeline.watch import Board

__all__ = [
    "DONE",
    "LANE_AGREEMENT",
    "LANE_B",
    "LANE_CONTROL",
    "LANE_F",
    "Collective",
    "Exchange",
    "Group",
    "Link",
    "Pending",
    "Transport",
    "lane_name",
    "not_a_peer",
    "own_part",
    "wait_text",
]

LANE_F, LANE_B, LANE_CONTROL, LANE_AGREEMENT = range(4)
_LANE_NAMES = {LANE_F: "F", LANE_B: "B", LANE_CONTROL: "control", LANE_AGREEMENT: "agreement"}


class Pending(Protocol):
    """A transfer or a collective that has been started."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensors are the caller's again; ``timeout`` in seconds, None for the transport's own.

        On CUDA the calling thread does not wait: later work of its current stream does, and the transport's
        own timeout holds.  Raises ``TransferTimeout``, ``RankDied`` or another ``LinkError``; a wait that
        has timed out is final, the ranks involved cannot exchange anything any more.  Waiting again returns
        at once.
        """


class Collective(Pending, Protocol):
    """A collective that has been started."""

    @property
    def ended(self) -> float | None:
        """When it ended, by ``time.perf_counter``; None as long as it has not, and where nobody can tell."""


class Link(Protocol):
    """Messages from rank to rank.

    A message waits for the receive that the peer posts, so neither side may count on the other's buffers.
    The k-th send to a peer on a lane meets the k-th receive which that peer posts there; lanes are
    independent of each other for tensors in host memory, while for tensors on an accelerator all lanes from
    one rank to another share one order.  Sent and posted must have the same type and number of elements.
    Nothing can be sent to oneself.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Prepare for messages from the first to the second rank of every pair.

        Collective over all ranks, with the same pairs on each.  Where connections need no preparation it
        does nothing; on an accelerator sends and receives outside the prepared pairs are refused.
        """

    def send(self, peer: int, tensor: Tensor, lane: int) -> Pending:
        """Start sending a contiguous tensor, which must not be changed before the wait has returned."""

    def receive(self, peer: int, buffer: Tensor, lane: int) -> Pending:
        """Post a contiguous tensor that the peer's next message on this lane will fill."""


class Exchange(Protocol):
    """Sums, joins and copies of tensors over some ranks; every member calls the same ones in the same order.

    Sums are taken in place and over any element type that the transport can add.  With ``async_op`` a
    collective is only started, and its tensors belong to the group until the wait has returned; else it has
    been completed.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the world, ascending."""

    @property
    def rank(self) -> int:
        """The caller's index among the members."""

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Collective:
        """Replace the tensor by its sum over the members."""

    def reduce_scatter(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        """Sum ``input`` over the members and keep the caller's part: 1-D, n elements of n × members."""

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        """Join the members' 1-D inputs of n elements in ``output`` of n × members elements."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with that of the member of index ``source``."""


class Group(Exchange, Protocol):
    """All collectives over some ranks, those of objects among them."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The members' tensors, all of one shape and type."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Copies of the members' objects, which must be picklable."""

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """A copy of the object that the member of index ``source`` gave."""

    def barrier(self) -> None:
        """Return when every member has called it."""


class Transport(Protocol):
    """One rank's access to all others, from which a mesh is made."""

    @property
    def link(self) -> Link: ...

    @property
    def world(self) -> Group: ...

    @property
    def board(self) -> Board:
        """Where the ranks of this host write what they are doing."""

    @property
    def random_lock(self) -> Lock | None:
        """To be held while random numbers are drawn, where ranks share a process and its generator."""

    def split(self, parts: Sequence[Sequence[int]], use: str = "") -> Group:
        """Split the world into parts, and return the group of that part which the caller is in.

        Collective over all ranks, with the same parts on each: every rank is in one of them, in ascending
        order. The same parts give the same group again, unless it is for another use: collectives of two threads
        must not meet in one group.
        """

    def aside(self) -> Group:
        """All ranks once more, for a thread beside the one that uses the world; for tensors in host memory and objects.

        The first call is collective; later ones give the same group.
        """


class _Done:
    """What has been completed already."""

    __slots__ = ()
    ended = None

    def wait(self, timeout: float | None = None) -> None:
        pass


DONE: Collective = _Done()


def own_part(parts: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """The part of the world that a rank is in."""
    for part in parts:
        if rank in part:
            return tuple(part)
    raise LinkError(f"rank {rank} is in none of the parts {[list(part) for part in parts]}; each rank must be in one")


def not_a_peer(rank: int, ranks: int, peer: int) -> LinkError:
    return LinkError(
        f"rank {rank} of {ranks} cannot exchange a message with rank {peer}: the peer must be another rank of the world"
    )


def wait_text(sending: bool, peer: int, lane: int) -> str:
    """What a rank waits for in a transfer: completes "rank 0 waits ..."."""
    return f"{'to send to' if sending else 'to receive from'} rank {peer} on lane {lane_name(lane)}"


def lane_name(lane: int) -> str:
    return _LANE_NAMES.get(lane, str(lane))
