"""Messages between processes of one host: through memory that they share, each rank woken by a pipe of its own.

What a rank sends it writes into a ring of the receiver's, one for each lane, and then a record of where it lies into
the receiver's pipe.  Reading that record is what tells of the message, so that no rank looks at memory which another
is still writing; and a pipe wakes its reader in one step, where a socket wakes a thread that wakes the reader.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from mmap import mmap
from platform import machine

from torch import Tensor

from pipeline.errors import LinkError, MessageMismatch, RankDied, TransferTimeout
from pipeline.links.distributed_link import TaggedLink, gave_up
from pipeline.links.host_memory import common_name, host_folder, shared_bytes
from pipeline.links.protocol import (
    DONE,
    LANE_AGREEMENT,
    LANE_B,
    LANE_CONTROL,
    LANE_F,
    Group,
    Pending,
    wait_text,
)
from pipeline.links.ring import Ring
from pipeline.links.tree import parent_and_children

__all__ = ["SharedLink", "is_possible"]

_RING_BYTES = {LANE_F: 2 << 20, LANE_B: 2 << 20, LANE_CONTROL: 64 << 10, LANE_AGREEMENT: 64 << 10}
"""The memory of each lane from one rank to another; a message takes half of it at most."""

_LANES_OF_PAIRS = (LANE_F, LANE_B, LANE_CONTROL)

_LARGEST = {lane: size // 2 for lane, size in _RING_BYTES.items()}
_COUNTER_BYTES = 64  # a cache line before each ring: the number of messages taken

_RECORD = struct.Struct("=HHII")  # source, lane, offset, bytes
_READ_AT_ONCE = _RECORD.size * 256
_NO_ROOM_PAUSE = 0.001  # seconds after which a rank that found no room looks again


def is_possible() -> bool:
    """Whether this machine orders writes to memory as the rings need it, and has pipes with names."""
    return sys.platform == "linux" and machine() in ("x86_64", "AMD64")


class _Outgoing:
    """The sender's side of one lane to one peer."""

    __slots__ = ("address", "bell", "lane", "peer", "ring", "taken", "waiting")

    def __init__(self, address: int, taken: memoryview, peer: int, lane: int, bell: int) -> None:
        self.peer = peer
        self.lane = lane
        self.bell = bell
        self.address = address + _COUNTER_BYTES
        self.taken = taken
        self.ring = Ring(_RING_BYTES[lane])
        self.waiting: deque[_Sending] = deque()

    def put(self, rank: int, tensor: Tensor, nbytes: int) -> bool:
        """Write a message and tell the peer; False when there is no room, which changes nothing."""
        offset = self.ring.place(nbytes, self.taken[0])
        if offset < 0:
            return False
        if nbytes:
            ctypes.memmove(self.address + offset, tensor.data_ptr(), nbytes)
        try:
            os.write(self.bell, _RECORD.pack(rank, self.lane, offset, nbytes))
        except BlockingIOError:  # the peer has not read its pipe for thousands of messages
            self.ring.take_back()
            return False
        except BrokenPipeError:
            raise RankDied(rank, self.peer, self.lane, wait_text(True, self.peer, self.lane)) from None
        return True


class _Incoming:
    """The receiver's side of one lane from one peer: messages that are there, and buffers that wait for one."""

    __slots__ = ("address", "arrived", "lane", "peer", "posted", "taken")

    def __init__(self, address: int, taken: memoryview, peer: int, lane: int) -> None:
        self.peer = peer
        self.lane = lane
        self.address = address + _COUNTER_BYTES
        self.taken = taken
        self.arrived: deque[tuple[int, int]] = deque()  # offset and bytes
        self.posted: deque[_Receiving] = deque()

    def match(self) -> None:
        """Fill posted buffers with what has arrived, in order."""
        while self.arrived and self.posted:
            receiving = self.posted.popleft()
            offset, nbytes = self.arrived.popleft()
            buffer = receiving.buffer
            if buffer.nbytes != nbytes:
                receiving.wrong = nbytes
            elif nbytes:
                ctypes.memmove(buffer.data_ptr(), self.address + offset, nbytes)
            self.taken[0] += 1
            receiving.done = True


class _Sending:
    """A message for which there was no room yet."""

    __slots__ = ("_link", "done", "nbytes", "outgoing", "tensor")

    def __init__(self, link: SharedLink, outgoing: _Outgoing, tensor: Tensor, nbytes: int) -> None:
        self._link = link
        self.outgoing = outgoing
        self.tensor = tensor
        self.nbytes = nbytes
        self.done = False

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            self._link.wait(self, self.outgoing.peer, self.outgoing.lane, True, timeout)


class _Receiving:
    """A posted buffer."""

    __slots__ = ("_link", "buffer", "done", "incoming", "wrong")

    def __init__(self, link: SharedLink, incoming: _Incoming, buffer: Tensor) -> None:
        self._link = link
        self.incoming = incoming
        self.buffer = buffer
        self.done = False
        self.wrong = -1  # bytes of the message, where they are not those of the buffer

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            self._link.wait(self, self.incoming.peer, self.incoming.lane, False, timeout)
        if self.wrong >= 0:
            raise MessageMismatch(
                f"rank {self._link.rank} had posted {self.buffer.nbytes} bytes for the next message "
                f"{wait_text(False, self.incoming.peer, self.incoming.lane)}, which has {self.wrong}"
            )


class SharedLink:
    """Small messages to ranks of the same host; all others go by ``tagged``.  Making one is collective.

    ``neighbours`` are the ranks of this host.  Which way a message takes follows from its size and its peer, which
    both sides know.
    """

    def __init__(self, tagged: TaggedLink, world: Group, neighbours: Sequence[int]) -> None:
        self.rank = tagged.rank
        self.ranks = tagged.ranks
        self.timeout = tagged.timeout
        self.tagged = tagged
        self._world = world
        self._neighbours = frozenset(neighbours)
        self._own_pipe, self._bells = _pipes(world, self.rank, neighbours)
        self._poll = select.poll()
        self._poll.register(self._own_pipe, select.POLLIN)
        self._peer_of_bell = {bell: peer for peer, bell in self._bells.items()}
        for bell in self._bells.values():
            self._poll.register(bell, 0)  # tells when the peer has closed its end, as it does when it dies
        self._gone: set[int] = set()
        self._given_up: set[int] = set()  # peers for which a wait has timed out
        self._made: set[tuple[int, int]] = set()
        self._memory: list[mmap] = []
        self._out: dict[tuple[int, int], _Outgoing] = {}
        self._in: dict[tuple[int, int], _Incoming] = {}
        self._waiting: list[_Outgoing] = []  # those with messages for which there was no room
        tree = [(rank, child) for rank in range(self.ranks) for child in parent_and_children(rank, self.ranks)[1]]
        self._make_rings([*tree, *((child, rank) for rank, child in tree)], [LANE_AGREEMENT])

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make rings for the pairs on each host; where there is no memory for them messages go on as before."""
        fresh = sorted(set(pairs) - self._made)
        self._made |= set(fresh)
        if fresh:
            self._make_rings(fresh, _LANES_OF_PAIRS)

    def _make_rings(self, pairs: Sequence[tuple[int, int]], lanes: Sequence[int]) -> None:
        sizes = [_COUNTER_BYTES + _RING_BYTES[lane] for lane in lanes]
        try:
            memory = shared_bytes(self._world, len(pairs) * sum(sizes))
        except OSError:  # on every rank alike
            return
        self._memory.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = 0
        for (source, destination), (lane, size) in product(pairs, zip(lanes, sizes, strict=True)):
            taken = memoryview(memory)[start : start + 8].cast("Q")
            if source == self.rank and destination in self._neighbours:
                bell = self._bells[destination]
                self._out[destination, lane] = _Outgoing(address + start, taken, destination, lane, bell)
            elif destination == self.rank and source in self._neighbours:
                self._in[source, lane] = _Incoming(address + start, taken, source, lane)
            start += size

    def let_go(self) -> None:
        """Close the pipes and drop torch's group, before it is unmade."""
        for file in (self._own_pipe, *self._bells.values()):
            with suppress(OSError):
                os.close(file)
        self.tagged.let_go()

    def send(self, peer: int, tensor: Tensor, lane: int) -> Pending:
        outgoing = self._out.get((peer, lane))
        nbytes = tensor.nbytes
        if outgoing is None or nbytes > _LARGEST[lane]:
            return self.tagged.send(peer, tensor, lane)
        if not tensor.is_contiguous():
            raise LinkError("a tensor to be sent must be contiguous")
        if not outgoing.waiting and outgoing.put(self.rank, tensor, nbytes):
            return DONE
        sending = _Sending(self, outgoing, tensor, nbytes)
        if not outgoing.waiting:
            self._waiting.append(outgoing)
        outgoing.waiting.append(sending)
        return sending

    def receive(self, peer: int, buffer: Tensor, lane: int) -> Pending:
        incoming = self._in.get((peer, lane))
        if incoming is None or buffer.nbytes > _LARGEST[lane]:
            return self.tagged.receive(peer, buffer, lane)
        if not buffer.is_contiguous():
            raise LinkError("a tensor to be filled by a message must be contiguous")
        receiving = _Receiving(self, incoming, buffer)
        incoming.posted.append(receiving)
        if incoming.arrived:
            incoming.match()
        return receiving

    def wait(self, transfer: _Sending | _Receiving, peer: int, lane: int, sending: bool, timeout: float | None) -> None:
        """Go on reading the pipe, and sending what found no room, until a transfer is done."""
        if peer in self._given_up:
            raise gave_up(self.rank, wait_text(sending, peer, lane))
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while not transfer.done:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._given_up.add(peer)
                raise TransferTimeout(self.rank, peer, lane, wait_text(sending, peer, lane), seconds)
            self._take(self._poll.poll(1000 * (min(remaining, _NO_ROOM_PAUSE) if self._waiting else remaining)))
            if self._waiting:
                self._retry()
            if peer in self._gone and not transfer.done:
                raise RankDied(self.rank, peer, lane, wait_text(sending, peer, lane))

    def _take(self, events: Iterable[tuple[int, int]]) -> None:
        """Read the records of messages that have arrived, and note whose pipe is closed."""
        for file, _ in events:
            if file != self._own_pipe:
                self._poll.unregister(file)
                self._gone.add(self._peer_of_bell[file])
                continue
            for source, lane, offset, nbytes in _RECORD.iter_unpack(os.read(file, _READ_AT_ONCE)):
                incoming = self._in[source, lane]
                incoming.arrived.append((offset, nbytes))
                incoming.match()

    def _retry(self) -> None:
        """Send what found no room, as far as there is some now."""
        for outgoing in tuple(self._waiting):
            while outgoing.waiting and outgoing.put(self.rank, outgoing.waiting[0].tensor, outgoing.waiting[0].nbytes):
                outgoing.waiting.popleft().done = True
            if not outgoing.waiting:
                self._waiting.remove(outgoing)


def _pipes(world: Group, rank: int, neighbours: Sequence[int]) -> tuple[int, dict[int, int]]:
    """The end for reading of this rank's pipe, and those for writing of its neighbours'.  Collective."""
    name = common_name(world)
    paths = {peer: host_folder() / f"{name}-{peer}" for peer in neighbours}
    os.mkfifo(paths[rank], 0o600)
    own = os.open(paths[rank], os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    world.barrier()
    bells = {
        peer: os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC) for peer, path in paths.items() if peer != rank
    }
    world.barrier()
    paths[rank].unlink()
    return own, bells
