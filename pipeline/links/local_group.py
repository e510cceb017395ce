"""Collectives of ranks that are threads of one process: the last to come does the work for all."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import LinkError, MessageMismatch, RankDied
from pipeline.links.threads import Ticket, World

__all__ = ["LocalGroup", "alone"]


class _Round:
    """One collective in which the members meet; ``call`` says which, and on what."""

    __slots__ = ("call", "mismatch", "missing", "payloads", "ranks", "tickets")

    lane = None

    def __init__(self, ranks: tuple[int, ...], call: str) -> None:
        self.ranks = ranks
        self.call = call
        self.mismatch = ""
        self.missing = len(ranks)
        self.payloads: list[Any] = [None] * len(ranks)
        self.tickets: list[Ticket | None] = [None] * len(ranks)

    def peer(self, rank: int) -> int | None:
        absent = self._absent()
        return absent[0] if len(absent) == 1 else None

    def wait_text(self, rank: int) -> str:
        absent = ", ".join(map(str, self._absent()))
        return f"in {self.call} over ranks {self.ranks} for {absent or 'the last of them'}"

    def objection(self, rank: int, call: str) -> LinkError | None:
        """What is wrong with this rank's coming here, if anything."""
        if call != self.call and not self.mismatch:
            first = next(r for r, ticket in zip(self.ranks, self.tickets, strict=True) if ticket is not None)
            self.mismatch = f"rank {first} is in {self.call}, but rank {rank} of the same group in {call}"
        if self.mismatch:
            return MessageMismatch(self.mismatch)
        for other in self.tickets:
            if other is not None and other.done:  # it has given up waiting
                return RankDied(rank, other.rank, None, self.wait_text(rank))
        return None

    def end(self, error: LinkError | None) -> None:
        """Complete the tickets of all who have come."""
        now = time.perf_counter()
        for ticket in self.tickets:
            if ticket is not None:
                ticket.ended = now
                ticket.complete(error)

    def _absent(self) -> list[int]:
        return [rank for rank, ticket in zip(self.ranks, self.tickets, strict=True) if ticket is None]


class _Meeting:
    """Where the members of a group meet, round after round; a member may be rounds ahead of another."""

    __slots__ = ("lock", "rounds")

    def __init__(self) -> None:
        self.lock = Lock()
        self.rounds: dict[int, _Round] = {}


class LocalGroup:
    """The Group of one rank among the threads of a process; sums are taken in rank order."""

    __slots__ = ("_meeting", "_round", "_world", "_world_rank", "rank", "ranks")

    def __init__(self, world: World, ranks: tuple[int, ...], world_rank: int, use: str = "") -> None:
        self.ranks = ranks
        self.rank = ranks.index(world_rank)
        self._world = world
        self._world_rank = world_rank
        self._round = 0
        with world.lock:
            self._meeting: _Meeting = world.shared.setdefault(("group", use, ranks), _Meeting())

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Ticket:
        return self._meet(f"all_reduce of {_form(tensor)}", tensor, _sum, async_op)[1]

    def reduce_scatter(self, output: Tensor, input: Tensor, async_op: bool = False) -> Ticket:
        call = self._scattering("reduce_scatter", part=output, whole=input)
        return self._meet(call, (output, input), _sum_parts, async_op)[1]

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool = False) -> Ticket:
        call = self._scattering("all_gather_into", part=input, whole=output)
        return self._meet(call, (output, input), _join_parts, async_op)[1]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        def copy(tensors: Sequence[Tensor]) -> None:
            for index, other in enumerate(tensors):
                if index != source:
                    other.copy_(tensors[source])

        self._meet(f"broadcast from {source} of {_form(tensor)}", tensor, copy)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(tensor, requires_grad=False) for _ in self.ranks]
        self._meet(f"all_gather of {_form(tensor)}", (outputs, tensor), _copy_to_all)
        return outputs

    def all_gather_object(self, obj: Any) -> list[Any]:
        met, _ = self._meet("all_gather_object", pickle.dumps(obj))
        return [pickle.loads(text) for text in met.payloads]

    def broadcast_object(self, obj: Any, source: int) -> Any:
        met, _ = self._meet(f"broadcast_object from {source}", pickle.dumps(obj) if self.rank == source else None)
        return pickle.loads(met.payloads[source])

    def barrier(self) -> None:
        self._meet("barrier", None)

    def _meet(
        self,
        call: str,
        payload: Any,
        combine: Callable[[list[Any]], None] = lambda payloads: None,
        async_op: bool = False,
    ) -> tuple[_Round, Ticket]:
        """Bring this member's payload to the round that is its next; the last member combines all of them."""
        self._world.refuse_if_failed(self._world_rank)
        with self._meeting.lock:
            rounds = self._meeting.rounds
            met = rounds.get(self._round)
            if met is None:
                met = rounds[self._round] = _Round(self.ranks, call)
            error = met.objection(self._world_rank, call)
            ticket = met.tickets[self.rank] = Ticket(self._world, self._world_rank, met, None)
            met.payloads[self.rank] = payload
            met.missing -= 1
            last = met.missing == 0  # asked here: after the lock, the one before the last may see it as well
            if last:
                del rounds[self._round]
        self._round += 1
        if error is not None:
            met.end(error)
        elif last:
            with torch.no_grad():
                combine(met.payloads)
            met.end(None)
        if not async_op:
            ticket.wait()
        return met, ticket

    def _scattering(self, call: str, part: Tensor, whole: Tensor) -> str:
        """The text of a call on parts; raises when the parts do not make the whole."""
        if part.numel() * len(self.ranks) != whole.numel() or part.dtype != whole.dtype:
            raise LinkError(
                f"{call} over {len(self.ranks)} ranks takes so many equal parts of a whole of the same type; "
                f"the part is {_form(part)}, the whole {_form(whole)}"
            )
        return f"{call} of {_form(whole)}"


def alone(ranks: tuple[int, ...]) -> LocalGroup:
    """The group of one rank of any world."""
    return LocalGroup(World(1), ranks, ranks[0])


def _form(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


# -- what the last member does: payloads come in rank order --------------------------------------------------


def _sum(tensors: Sequence[Tensor]) -> None:
    total, *others = tensors
    for other in others:
        total.add_(other)
    for other in others:
        other.copy_(total)


def _sum_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for index, (output, _) in enumerate(pairs):
        part = slice(index * output.numel(), (index + 1) * output.numel())
        total = pairs[0][1][part].clone()  # an output may be a part of an input
        for _, whole in pairs[1:]:
            total.add_(whole[part])
        output.copy_(total)


def _join_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for output, _ in pairs:
        for index, (_, part) in enumerate(pairs):
            output[index * part.numel() : (index + 1) * part.numel()].copy_(part)


def _copy_to_all(pairs: Sequence[tuple[list[Tensor], Tensor]]) -> None:
    for outputs, _ in pairs:
        for output, (_, tensor) in zip(outputs, pairs, strict=True):
            output.copy_(tensor)
