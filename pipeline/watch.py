"""What every rank is doing right now, where the others can read it, and the report that explains a hang."""

from __future__ import annotations

import enum
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from schedules import Op
from schedules.action import actions_of

if TYPE_CHECKING:
    from mmap import mmap

    from schedules import Action, Instruction, Pair

__all__ = ["BYTES_PER_RANK", "At", "Board", "State", "hang_report"]

# One cache line a rank, so that ranks do not slow each other down: eight words of eight bytes.
_CODE, _SINCE, _STEP, _FAILED, _PROCESS = range(5)
_WORDS = 8
BYTES_PER_RANK = 8 * _WORDS
_ELSEWHERE = -1  # instead of the number of a process, which means nothing on another host


class At(enum.IntEnum):
    """Where a rank is when it is not in its Program; instructions have the codes from 0 on."""

    OUTSIDE = -1
    OPENING = -2
    CLOSING = -3
    PROFILE = -4
    LEFT = -5


_PLACES: dict[int, str] = {
    At.OUTSIDE: "is outside of any step",
    At.OPENING: "is in the agreement that opens a step",
    At.CLOSING: "is in the agreement that closes a step",
    At.PROFILE: "measures the layers",
    At.LEFT: "has left",
}
_AGREEMENTS: dict[int, str] = {At.OPENING: "opens", At.CLOSING: "closes"}


class State(NamedTuple):
    """What a rank last wrote: its place (see ``Board.at``), for how many seconds it is there, in which step."""

    code: int
    seconds: float
    step: int
    failed: bool
    process: int


class Board:
    """The ranks' notes about themselves, in memory that all ranks of a host share.

    Writing takes well under a microsecond and wakes nobody.  ``memory`` is zeroed and holds
    ``BYTES_PER_RANK`` for each rank of the world: a bytearray where ranks are threads, a mapped file where
    they are processes.
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
        """Note where this rank is: the index of an instruction in its row, or one of At."""
        base = self._base
        self._words[base] = code
        self._times[base + 1] = self._clock()

    def begin(self, step: int) -> None:
        """Note that this rank opens a step, in which it has not failed."""
        self._words[self._base + _FAILED] = 0
        self._words[self._base + _STEP] = step
        self.at(At.OPENING)

    def fail(self, step: int) -> None:
        """Note that what this rank sends in this step means nothing any more; called before it sends."""
        self._words[self._base + _FAILED] = step + 1

    def failed(self, rank: int, step: int) -> bool:
        """Whether a rank has failed in this step.  False may also mean that it is on another host."""
        return self._words[rank * _WORDS + _FAILED] == step + 1

    def copy(self, rank: int, state: State) -> None:
        """Write down what a rank of another host was heard to do, for those of this host."""
        base = rank * _WORDS
        self._words[base + _CODE] = state.code
        self._times[base + _SINCE] = self._clock() - state.seconds  # clocks of hosts have nothing in common
        self._words[base + _FAILED] = state.step + 1 if state.failed else 0
        self._words[base + _STEP] = state.step
        self._words[base + _PROCESS] = _ELSEWHERE

    def state(self, rank: int) -> State:
        """What a rank last wrote."""
        words, base = self._words, rank * _WORDS
        seconds = self._clock() - self._times[base + _SINCE]
        step, process = words[base + _STEP], words[base + _PROCESS]
        return State(words[base + _CODE], seconds, step, step >= 0 and self.failed(rank, step), process)


# -- the report ----------------------------------------------------------------------------------------------


class _Need(NamedTuple):
    """What an instruction cannot be completed without: that ``peer`` has gone beyond an index of its row."""

    text: str
    peer: int
    beyond: int


class _Wait(NamedTuple):
    """What keeps a rank, and the ranks that have to act first."""

    text: str
    peers: tuple[int, ...]


_Needs = Mapping[tuple[int, int], Sequence[_Need]]  # by rank of the pipeline and index in its row


def hang_report(
    board: Board, rows: Sequence[Sequence[Instruction]], pipelines: Sequence[Sequence[int]] | None = None
) -> str:
    """A line for each rank: what it does or waits for, and since when; then cycles and who holds up whom.

        rank 0 waits in RECV_B 0B0 for rank 1, which waits too
        rank 1 waits in RECV_B 1B0 for rank 2, which is in 2F0 since 61 s
        rank 2 is in 2F0 since 61 s
        rank 2 holds up ranks 0, 1

    ``rows`` are those of the Program, one for each rank of a pipeline, and ``pipelines`` are the ranks of the world in
    each of them; without these, so many ranks after each other.  A rank waits when the Program says that its
    instruction needs a message, and that the other side has not come to its part of it: nothing is noted about waits
    at run time.
    """
    states = [board.state(rank) for rank in range(board.ranks)]
    needs = _needs(rows)
    if pipelines is None:
        pipelines = [range(first, first + len(rows)) for first in range(0, board.ranks, len(rows))]
    places = {rank: (place, pipeline) for pipeline in pipelines for place, rank in enumerate(pipeline)}
    waits = {rank: wait for rank in range(board.ranks) if (wait := _wait(rank, states, needs, *places[rank]))}
    activities = [_activity(state, rows[places[rank][0]]) for rank, state in enumerate(states)]
    lines = []
    for rank, activity in enumerate(activities):
        wait = waits.get(rank)
        if wait is not None:
            others = f"ranks {_listed(wait.peers)}"
            if len(wait.peers) == 1:
                peer = wait.peers[0]
                others = f"rank {peer}, which {'waits too' if peer in waits else activities[peer]}"
            activity = f"waits in {wait.text} for {others}"
        lines.append(f"rank {rank} {activity}")
    return "\n".join([*lines, *_cycles(waits), *_culprits(waits)])


def _needs(rows: Sequence[Sequence[Instruction]]) -> _Needs:
    """By where an instruction stands: the messages that it completes."""
    sent: dict[tuple[int, int, str], list[tuple[int, Action | Pair | None]]] = {}
    received: dict[tuple[int, int, str], list[Action | Pair | None]] = {}
    computed: dict[tuple[int, Action | Pair | None], int] = {}
    awaited: dict[tuple[int, Action | Pair | None], int] = {}
    for rank, row in enumerate(rows):
        for index, (op, action, peer, _) in enumerate(row):
            way, _, lane = op.partition("_")
            if way == "SEND":
                sent.setdefault((rank, peer, lane), []).append((index, action))
            elif way == "RECV":
                received.setdefault((peer, rank, lane), []).append(action)
            elif op == Op.WAIT_SEND:
                awaited[rank, action] = index
            elif action is not None:
                computed.update({(rank, single): index for single in actions_of(action)})
    needs: dict[tuple[int, int], list[_Need]] = {}
    for (source, destination, lane), messages in sent.items():  # the k-th send meets the k-th receive
        consumers = received.get((source, destination, lane), ())
        for (index, producer), consumer in zip(messages, consumers, strict=False):
            taken = computed[destination, consumer]
            needs.setdefault((destination, taken), []).append(_Need(f"RECV_{lane} {consumer}", source, index))
            if (source, producer) in awaited:
                place = source, awaited[source, producer]
                needs.setdefault(place, []).append(_Need(f"WAIT_SEND {producer}", destination, taken))
    return needs


def _wait(rank: int, states: Sequence[State], needs: _Needs, place: int, pipeline: Sequence[int]) -> _Wait | None:
    """What keeps a rank at this place of its pipeline, if anything does."""
    state = states[rank]
    if state.process == 0:
        return None
    for need in needs.get((place, state.code), ()):
        peer = pipeline[need.peer]
        if states[peer].process != 0 and _progress(states[peer], state.step) <= need.beyond:
            return _Wait(need.text, (peer,))
    if state.code not in (At.OPENING, At.CLOSING):
        return None
    here = -1.0 if state.code == At.OPENING else _END
    absent = tuple(other for other, its in enumerate(states) if its.process != 0 and _progress(its, state.step) < here)
    return _Wait(f"the agreement that {_AGREEMENTS[state.code]} the step", absent) if absent else None


_BEFORE, _END = -2.0, math.inf


def _progress(state: State, step: int) -> float:
    """How far a rank has come in a step: the index of its instruction, or beyond either end of its row."""
    if state.code == At.LEFT or state.step < step:
        return _BEFORE  # whatever it did, nothing more will come
    if state.step > step or state.code in (At.CLOSING, At.OUTSIDE):
        return _END
    return state.code if state.code >= 0 else -1.0


def _activity(state: State, row: Sequence[Instruction]) -> str:
    if state.process == 0:
        return "has not told what it does"
    if state.code >= 0:
        text = f"is in {row[state.code]}" if state.code < len(row) else f"is in instruction {state.code}"
    else:
        text = _PLACES[state.code]
    if not _alive(state.process):
        return f"has died; it last told that it {text}"
    failed = ", after it failed," if state.failed else ""
    return f"{text}{failed} since {state.seconds:.{0 if state.seconds > 10 else 1}f} s"


def _alive(process: int) -> bool:
    """Whether a process exists, as far as one can see from this host."""
    if process == _ELSEWHERE:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Whether a process has ended, and its parent has not asked yet how; as far as the system tells."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False


def _cycles(waits: Mapping[int, _Wait]) -> Iterator[str]:
    """Ranks that wait for each other.  Only messages can make a cycle: each has one peer."""
    seen: set[int] = set()
    for start in waits:
        path: list[int] = []
        rank = start
        while rank not in seen and rank in waits and len(waits[rank].peers) == 1:
            seen.add(rank)
            path.append(rank)
            rank = waits[rank].peers[0]
        if rank in path:
            cycle = [*path[path.index(rank) :], rank]
            yield "a cycle: " + " waits for ".join(f"rank {r}" for r in cycle)


def _culprits(waits: Mapping[int, _Wait]) -> Iterator[str]:
    """Ranks that wait for nobody, and those which wait for them, directly or through others."""
    for culprit in sorted({peer for wait in waits.values() for peer in wait.peers} - set(waits)):
        held: set[int] = {culprit}
        while more := {rank for rank, wait in waits.items() if held & set(wait.peers)} - held:
            held |= more
        behind = sorted(held - {culprit})
        yield f"rank {culprit} holds up {'rank' if len(behind) == 1 else 'ranks'} {_listed(behind)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
