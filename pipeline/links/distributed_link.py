"""Messages between processes: by tag where the backend knows tags, else one connection for each direction."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.device import bound, on_host, transfer_backend
from pipeline.errors import LinkError, RankDied, TransferTimeout
from pipeline.links.protocol import Pending, not_a_peer, wait_text

__all__ = ["PairLink", "TaggedLink", "gave_up", "translated"]


class _Transfer:
    """A message under way; the work holds its tensor."""

    __slots__ = ("_lane", "_link", "_peer", "_sending", "_work")

    def __init__(self, work: dist.Work, link: TaggedLink, peer: int, lane: int, sending: bool) -> None:
        self._work: dist.Work | None = work
        self._link = link
        self._peer = peer
        self._lane = lane
        self._sending = sending

    def wait(self, timeout: float | None = None) -> None:
        work = self._work
        if work is None:
            return
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._link.failure(error, self._peer, self._lane, self._sending, timeout) from None
        self._work = None


class TaggedLink:
    """Tensors in host memory: one process group for all peers, a lane is a tag.

    ``timeout`` is the group's own.  The group's methods are called directly, since the functions of
    torch.distributed around them check again for each message what cannot change.
    """

    __slots__ = ("_group", "_peers", "rank", "ranks", "timeout")

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: int, timeout: float) -> None:
        self._group = group
        self.rank = rank
        self.ranks = ranks
        self.timeout = timeout
        self._peers = frozenset(range(ranks)) - {rank}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Nothing to prepare: every process is connected to every other from the start."""

    def let_go(self) -> None:
        """Drop torch's group, before it is unmade."""
        del self._group

    def send(self, peer: int, tensor: Tensor, lane: int) -> Pending:
        if peer not in self._peers:  # of which the backend would not complain, but wait
            raise not_a_peer(self.rank, self.ranks, peer)
        try:
            return _Transfer(self._group.send([tensor], peer, lane), self, peer, lane, True)
        except RuntimeError as error:
            raise self.failure(error, peer, lane, True) from None

    def receive(self, peer: int, buffer: Tensor, lane: int) -> Pending:
        if peer not in self._peers:
            raise not_a_peer(self.rank, self.ranks, peer)
        try:
            return _Transfer(self._group.recv([buffer], peer, lane), self, peer, lane, False)
        except RuntimeError as error:
            raise self.failure(error, peer, lane, False) from None

    def failure(
        self, error: RuntimeError, peer: int, lane: int, sending: bool, timeout: float | None = None
    ) -> LinkError:
        """What an error of the backend means."""
        seconds = self.timeout if timeout is None else timeout
        return translated(error, self.rank, peer, lane, wait_text(sending, peer, lane), seconds)


class PairLink:
    """Tensors on an accelerator: a group of two ranks for each direction in which a pair exchanges messages.

    Such groups know no tags, and run what is queued on them in order, each on a stream of its own.  With one
    for each direction no message waits for one of the other direction, and those of one direction wait only
    for each other, in an order that the two ranks agree on.  Tensors in host memory go by the tagged link.
    """

    __slots__ = ("_device", "_from", "_made", "_tagged", "_to", "rank", "ranks")

    def __init__(self, tagged: TaggedLink, device: torch.device) -> None:
        self.rank = tagged.rank
        self.ranks = tagged.ranks
        self._tagged = tagged
        self._device = device
        self._made: set[tuple[int, int]] = set()
        self._to: dict[int, dist.ProcessGroup] = {}
        self._from: dict[int, dist.ProcessGroup] = {}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        for source, destination in sorted(set(pairs) - self._made):
            group = dist.new_group(
                [source, destination],
                backend=transfer_backend(self._device),
                timeout=timedelta(seconds=self._tagged.timeout),
                device_id=bound(self._device),
            )
            if source == self.rank:
                self._to[destination] = group
            elif destination == self.rank:
                self._from[source] = group
            self._made.add((source, destination))

    def let_go(self) -> None:
        """Drop torch's groups, before they are unmade."""
        self._to.clear()
        self._from.clear()
        self._tagged.let_go()

    def send(self, peer: int, tensor: Tensor, lane: int) -> Pending:
        if on_host(tensor):
            return self._tagged.send(peer, tensor, lane)
        return self.queue_send(peer, tensor)

    def receive(self, peer: int, buffer: Tensor, lane: int) -> Pending:
        if on_host(buffer):
            return self._tagged.receive(peer, buffer, lane)
        return self.queue_receive(peer, buffer)

    def queue_send(self, peer: int, tensor: Tensor) -> Pending:
        """Send over the pair's own connection, wherever the tensor is."""
        group = self._to.get(peer)
        if group is None:
            raise self._unconnected(self.rank, peer)
        return _Queued(group.send([tensor], int(peer > self.rank), 0), tensor)

    def queue_receive(self, peer: int, buffer: Tensor) -> Pending:
        """Receive over the pair's own connection, wherever the buffer is."""
        group = self._from.get(peer)
        if group is None:
            raise self._unconnected(peer, self.rank)
        return _Queued(group.recv([buffer], int(peer > self.rank), 0), buffer)

    def _unconnected(self, source: int, destination: int) -> LinkError:
        return LinkError(
            f"there is no connection from rank {source} to rank {destination}: connect was called for "
            f"{sorted(self._made)}, and must be called by all ranks for all pairs that exchange messages"
        )


class _Queued:
    """A message on its group's stream.  It keeps the tensor's memory from being used again until the wait."""

    __slots__ = ("_tensor", "_work")

    def __init__(self, work: dist.Work, tensor: Tensor) -> None:
        self._work: dist.Work | None = work
        self._tensor: Tensor | None = tensor

    def wait(self, timeout: float | None = None) -> None:
        """Let later work of the current stream wait; with a timeout the backend would block this thread."""
        if self._work is not None:
            self._work.wait()
            self._work = self._tensor = None


def translated(
    error: RuntimeError, rank: int, peer: int | None, lane: int | None, what: str, seconds: float
) -> LinkError:
    """What an error of the backend means; ``what`` completes "rank 0 waits ..."."""
    text = str(error).lower()
    if "pair closure" in text:
        return gave_up(rank, what)
    if "timed out" in text or "timeout" in text:
        return TransferTimeout(rank, peer, lane, what, seconds)
    if any(sign in text for sign in _SIGNS_OF_DEATH):
        return RankDied(rank, peer, lane, what)
    return LinkError(f"rank {rank} waited {what}: {error}")


def gave_up(rank: int, what: str) -> LinkError:
    """What comes after a wait that has timed out."""
    return LinkError(f"rank {rank} waited {what}, but can exchange nothing since it gave up an earlier wait")


_SIGNS_OF_DEATH = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
)
