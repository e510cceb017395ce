"""V-Half and V-Min: half and a third of the activations of 1F1B (arXiv 2405.15362).

4 ranks, 6 micro-batches; two characters are a unit of time, 0 is a forward, a the gradient of its input, A that of its
weights, ' marks the rank's second stage. V-Half and V-Min:

    rank 0 | 0 1 2 3 4 . . 0'a'A'1'b'B'. 2'a c'A C'3'5 b d'B D'4'e'c E'C . 5'f'd F'e D E . f F
    rank 1 | . 0 1 2 3 . 0'. 1'a'A'. b'2'a B'4 A 3'c'b C'5 B 4'd'c D'C e'5'E'd f'e D F'E f F .
    rank 2 | . . 0 1 2 0'3 1'. . a'A'2'a b'A B'3'4 b c'B C'4'5 c d'C D'5'e'd E'e f'D E f F'F .
    rank 3 | . . . 0 0'1 1'2 2'. . a'a A'3 A 3'b'b B'4 B 4'c'c C'5 C 5'd'd e'e D'D f'f E'E F'F

    rank 0 | 0 1 . . . . . 0'a'2 A'. . 1'b'a B'3 A 2'c'b C'4 B 3'd'c D'5 C 4'e'd E'D . 5'f'e F'E . . . f F
    rank 1 | . 0 . . . . 0'1 . a'A'. 1'2 a b'A B'2'3 b c'B C'3'4 c d'C D'4'5 d e'D E'5'. e f'E F'. . f F .
    rank 2 | . . 0 . . 0'. . 1 . a'1'A'a 2 A b'2'B'b 3 B c'3'C'c 4 C d'4'D'd 5 D e'5'E'e E . f'F'. f F . .
    rank 3 | . . . 0 0'. . . . 1 1'a'a A'A 2 2'b'b B'B 3 3'c'c C'C 4 4'd'd D'D 5 5'e'e E'E . . f'f F'F . .

On the V of zb-v, the F and I of one micro-batch are a block of slots; repeated every 6 slots, blocks fill all ranks
without a collision, and the shorter they are, the fewer are open at once: p/2 + 1 micro-batches in V-Half, (p + 4)/3 in
V-Min. W fills what is left, and passes are pulled into gaps where the memory allows it. With equal costs V-Half reaches
the bound for its memory, a bubble of (3p - 7)/2 for even p. ``costs`` are those to time the order for, ``memory_cap``
is the memory of a rank if not the block's own, in micro-batches of a rank's whole share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedules.costs import Costs
from schedules.critical import Network
from schedules.errors import ImpossibleShape
from schedules.greedy import Lanes, as_table, best
from schedules.improve import improve
from schedules.orders import Block, in_blocks
from schedules.placement import wave
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table


def half(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """What every rank holds at most in V-Half."""
    return min(ranks / 2 + 1, micro_batches)


def third(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """What every rank holds at most in V-Min."""
    return min((ranks + 4) // 3, micro_batches)


@schedule("v-half", placement=wave, stages_per_rank=Stages(2, 2, 2), splits_backward=True, peak=half)
def v_half(shape: Shape, *, costs: Costs | None = None, memory_cap: float | None = None) -> Iterator[Table]:
    """Zero bubble in a V with half the activations of 1F1B, timed for the costs it is given."""
    cap = half(shape.ranks, 2, shape.micro_batches) if memory_cap is None else memory_cap
    return _timed(shape, costs, cap, [Block(2, 1, 2, 1, turn) for turn in (1, 4)])


@schedule("v-min", placement=wave, stages_per_rank=Stages(2, 2, 2), splits_backward=True, peak=third)
def v_min(shape: Shape, *, costs: Costs | None = None, memory_cap: float | None = None) -> Iterator[Table]:
    """The least activations of all, a third of those of 1F1B, for more bubble, above all where links are slow."""
    cap = third(shape.ranks, 2, shape.micro_batches) if memory_cap is None else memory_cap
    blocks = [Block(1, forth, 1, forth, turn) for forth in (1, 2) for turn in (1, 4)]
    return _timed(shape, costs, cap, blocks)


def _timed(shape: Shape, costs: Costs | None, cap: float, blocks: Sequence[Block]) -> Iterator[Table]:
    """The best order that repeats one of the blocks, the more often the better."""
    lanes = Lanes.of(shape.placement, shape.micro_batches, costs or Costs())
    caps = [cap] * shape.ranks
    for period in (6, 7, 8, 10, 12, 18, 24, 16 * shape.ranks):
        arranged = best(lanes, [in_blocks(block, period, shape.ranks, shape.micro_batches) for block in blocks], caps)
        if arranged is not None:
            break
    else:
        raise ImpossibleShape(f"a rank has to hold one micro-batch, memory_cap is {cap}; set memory_cap to 1 or more")
    rows = arranged.rows
    if costs is not None:
        rows = improve(Network.of(lanes), rows, caps, tries=min(300, 200_000 // sum(map(len, rows))))
    return (as_table(lanes, row) for row in rows)
