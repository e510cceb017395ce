"""What every rank is doing right now, where the others can read it, and the report that explains a hang."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mmap import mmap

    from schedules import Action, Instruction, Pair

__all__ = ["BYTES_PER_RANK", "At", "Board", "State", "hang_report"]

# One cache line a rank, so that ranks do not slow each other down: eight words of eight bytes.
_CODE, _SINCE, _STEP, _FAILED, _PROCESS = range(5)
_WORDS = 8
BYTES_PER_RANK = 8 * _WORDS


class At(enum.IntEnum):
    """Where a rank is when it is not in its Program; instructions have the codes from 0 on."""

    OUTSIDE = -1
    OPENING = -2
    CLOSING = -3
    PROFILE = -4
    LEFT = -5


_PLACE_NAMES = {
    At.OUTSIDE: "is outside of any step",
    At.OPENING: "is in the agreement that opens a step",
    At.CLOSING: "is in the agreement that closes a step",
    At.PROFILE: "measures its layers",
    At.LEFT: "has left",
}


class State(NamedTuple):
    """What a rank last wrote: an At or the index of an instruction, for how many seconds, in which step."""

    code: int
    seconds: float
    step: int
    failed: bool
    process: int


class Board:
    """The ranks' notes about themselves, in memory that all ranks of a host share.

    Writing takes well under a microsecond and wakes nobody.  ``memory`` is zeroed and holds
    ``BYTES_PER_RANK`` for each rank of the world: a bytearray where ranks are threads, a mapped file where
    they are processes. Ranks that never wrote here, because they are on another host, are unknown to the
    board.
    """

    __slots__ = ("_base", "_clock", "_times", "_words", "rank", "ranks")

    def __init__(self, memory: bytearray | mmap, rank: int) -> None:
        view = memoryview(memory).cast("B")
        self._words = view.cast("q")
        self._times = view.cast("d")
        self._base = rank * _WORDS
        self._clock = time.monotonic  # one clock for all processes of a host
        self.rank = rank
        self.ranks = len(view) // BYTES_PER_RANK
        self._words[self._base + _STEP] = -1
        self.at(At.OUTSIDE)
        self._words[self._base + _PROCESS] = os.getpid()

    @staticmethod
    def alone(rank: int = 0, ranks: int = 1) -> Board:
        """A board that nobody else sees."""
        return Board(bytearray(BYTES_PER_RANK * ranks), rank)

    def at(self, code: int) -> None:
        """Note where this rank is: the index of an instruction in its row, or a At."""
        base = self._base
        self._words[base] = code
        self._times[base + 1] = self._clock()

    def begin(self, step: int) -> None:
        """Note that this rank opens a step."""
        self._words[self._base + _STEP] = step
        self.at(At.OPENING)

    def fail(self, step: int) -> None:
        """Note that what this rank sends in this step means nothing any more; called before it sends."""
        self._words[self._base + _FAILED] = step + 1

    def failed(self, rank: int, step: int) -> bool:
        """Whether a rank has failed in this step.  False may also mean that it is on another host."""
        return self._words[rank * _WORDS + _FAILED] == step + 1

    def knows(self, rank: int) -> bool:
        """Whether the rank writes here."""
        return self._words[rank * _WORDS + _PROCESS] != 0

    def state(self, rank: int) -> State:
        """What a rank last wrote."""
        words, base = self._words, rank * _WORDS
        step = words[base + _STEP]
        seconds = self._clock() - self._times[base + _SINCE]
        return State(words[base + _CODE], seconds, step, words[base + _FAILED] == step + 1, words[base + _PROCESS])


# -- the report ----------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """A message of the Program: where it is sent and posted, as indices into the two ranks' rows."""

    source: int
    sent: int
    destination: int
    posted: int


@dataclass(frozen=True, slots=True)
class _Wait:
    """What keeps a rank: the instruction that cannot be completed, and the rank that has to act first."""

    text: str
    peer: int


def hang_report(board: Board, rows: Sequence[Sequence[Instruction]]) -> str:
    """A line for each rank: what it does or waits for, and since when; then cycles and who holds up whom.

    ``rows`` are those of the Program, one for each rank of a pipeline; ranks of the world beyond that are
    further pipelines of the same Program.  A rank waits for a message when the Program says that the other
    side has not come to its part of it; nothing needs to be noted about waits at run time.
    """
    messages = tuple(_messages(rows))
    states = [board.state(rank) for rank in range(board.ranks)]
    waits = {
        rank: wait
        for rank in range(board.ranks)
        if board.knows(rank) and (wait := _wait(rank, states, rows, messages)) is not None
    }
    lines = []
    for rank, state in enumerate(states):
        text = _activity(board, rank, state, rows)
        if rank in waits:
            wait = waits[rank]
            peer = _activity(board, wait.peer, states[wait.peer], rows)
            text = f"waits in {wait.text} for rank {wait.peer}, which {peer}"
        lines.append(f"rank {rank} {text}")
    return "\n".join(lines + _verdict(waits))


def _messages(rows: Sequence[Sequence[Instruction]]) -> Iterator[_Message]:
    """The k-th send from one rank to another on a lane meets the k-th receive there."""
    sends: dict[tuple[int, int, str], list[int]] = {}
    receives: dict[tuple[int, int, str], list[int]] = {}
    for rank, row in enumerate(rows):
        for index, instruction in enumerate(row):
            way, _, lane = instruction.op.partition("_")
            if way == "SEND":
                sends.setdefault((rank, instruction.peer, lane), []).append(index)
            elif way == "RECV":
                receives.setdefault((instruction.peer, rank, lane), []).append(index)
    for (source, destination, lane), indices in sends.items():
        for sent, posted in zip(indices, receives.get((source, destination, lane), ()), strict=False):
            yield _Message(source, sent, destination, posted)


def _wait(
    rank: int, states: Sequence[State], rows: Sequence[Sequence[Instruction]], messages: Sequence[_Message]
) -> _Wait | None:
    """The first message that a rank needs to complete its instruction, and whose other side is missing."""
    own, first = rank % len(rows), rank - rank % len(rows)  # the pipeline axis is the inner one
    step, code = states[rank].step, states[rank].code
    if not 0 <= code < len(rows[own]):
        return None
    now = rows[own][code]
    for message in messages:
        if message.destination == own and message.posted <= code:
            post = rows[own][message.posted]
            needed = message.posted == code or not _actions(post).isdisjoint(_actions(now))
            peer = first + message.source
            if needed and now.op[:4] not in ("SEND", "WAIT") and _progress(states[peer], step) <= message.sent:
                return _Wait(f"{post.op} {post.action}", peer)
        elif message.source == own and message.sent <= code and now.op in ("WAIT_SEND", "STEP"):
            send = rows[own][message.sent]
            needed = now.op == "STEP" or not _actions(send).isdisjoint(_actions(now))
            peer = first + message.destination
            if needed and _progress(states[peer], step) < message.posted:
                return _Wait(f"{send.op} {send.action}", peer)
    return None


def _actions(instruction: Instruction) -> frozenset[Action | Pair]:
    """The single actions that an instruction is about."""
    action = instruction.action
    if action is None:
        return frozenset()
    return frozenset((action.first, action.second) if instruction.op == "PAIR" else (action,))  # type: ignore[union-attr]


def _progress(state: State, step: int) -> float:
    """How far a rank has come in this step: the index of its instruction, or beyond either end of its row."""
    if state.step != step:
        return float("inf") if state.step > step else -1.0
    if state.code >= 0:
        return state.code
    return float("inf") if state.code in (At.CLOSING, At.OUTSIDE, At.LEFT) else -1.0


def _activity(board: Board, rank: int, state: State, rows: Sequence[Sequence[Instruction]]) -> str:
    if not board.knows(rank):
        return "is on another host"
    row = rows[rank % len(rows)]
    if 0 <= state.code < len(row):
        now = row[state.code]
        text = f"is in {now.action if now.op in ('F', 'B', 'I', 'W', 'PAIR') else now}"
    else:
        text = _PLACE_NAMES.get(At(state.code), "") if state.code in _PLACE_NAMES else "is nowhere in its program"
    if not _alive(state.process):
        return f"has died: process {state.process} is gone, and it last wrote that it {text}"
    failed = " after it failed" if state.failed else ""
    return f"{text}{failed} since {state.seconds:.0f} s"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _verdict(waits: dict[int, _Wait]) -> list[str]:
    """Cycles of ranks that wait for each other; ranks that others wait for and that wait for nobody."""
    lines = []
    seen: set[int] = set()
    for start in waits:
        path: list[int] = []
        rank = start
        while rank in waits and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits[rank].peer
        if rank in path:
            cycle = [*path[path.index(rank) :], rank]
            lines.append("a cycle: " + " waits for ".join(f"rank {r}" for r in cycle))
    for rank in sorted({wait.peer for wait in waits.values()} - set(waits)):
        held = sorted(_behind(rank, waits))
        lines.append(f"rank {rank} holds up {'rank' if len(held) == 1 else 'ranks'} {', '.join(map(str, held))}")
    return lines


def _behind(rank: int, waits: dict[int, _Wait]) -> set[int]:
    """Ranks that wait for this one, directly or through others."""
    held: set[int] = set()
    grown = True
    while grown:
        more = {r for r, wait in waits.items() if wait.peer == rank or wait.peer in held} - held
        grown = bool(more)
        held |= more
    return held
