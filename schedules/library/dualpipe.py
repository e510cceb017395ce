"""DualPipe and DualPipeV: micro-batches from both ends, forwards paired with backwards (arXiv 2412.19437).

4 ranks, 8 micro-batches; two characters are a unit of time, 0 is a forward, aaa its backward, a and A its two halves,
' marks the stages of the copy that is entered at the last rank:

    rank 0 | 0 2 4 1'b'B'3'6 ddd'5'aaa fff'7'. ccc hhh'e E g G
    rank 1 | . 0 1'2 3'4 bbb'5'aaa 6 ddd'7'ccc fff'eee h'g H'G
    rank 2 | . 1'0 3'2 5'aaa 4 bbb'7'ccc 6 ddd'eee fff'g h'G H'
    rank 3 | 1'3'5'0 a A 2 7'ccc 4 bbb'eee 6 . ddd'ggg f'F'h'H'

DualPipe keeps two copies of the weights. Even micro-batches enter at rank 0, odd ones at rank p - 1, and the ranks in
the middle begin after p/2 - 1 others only. DualPipeV folds one copy into a V, here 3 ranks and 6 micro-batches, '
marking the rank's second stage:

    rank 0 | 0 1 2 3 4 0'a'A'1'b'B'2'5 ccc'3'aaa ddd'4'. bbb eee'5'. ccc fff'd D e E f F
    rank 1 | . 0 1 2 0'3 1'a'A'2'4 bbb'3'aaa 5 ccc'4'bbb ddd'5'. ccc eee'ddd f'e F'f E F
    rank 2 | . . 0 0'1 1'2 2'3 aaa'3'aaa 4 bbb'4'bbb 5 ccc'5'ccc ddd'ddd eee'e f'f E F'F

In the steady state a forward and the backward of another micro-batch follow each other, and by default the forward's
result is sent before the backward runs: for W <= I <= F the bubble is (p/2 - 1)(F + I - W), (p - 1)(F + I - W)/2 in
DualPipeV. With ``overlapped=True`` the two are one instruction, for layers that hide the messages of one behind the
work of the other. Unless they do, that costs (p/2 - 1)F more, (p - 1)F/2 in DualPipeV. For fewer than 2p micro-batches
the order is that for 2p without the rest. Ranks hold p + 1 micro-batches, in DualPipeV p + 1/2.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from schedules.action import Kind
from schedules.placement import both_ways, wave
from schedules.registry import EVEN_RANKS, Shape, Stages, schedule
from schedules.table import KIND, KINDS, MICRO_BATCH, Table, alternate, in_order, joined, kept, passes


@schedule(
    "dualpipe",
    placement=both_ways,
    stages_per_rank=Stages(2, 2, 2),
    ranks=EVEN_RANKS,
    splits_backward=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks + 1, micro_batches),
)
def dualpipe(shape: Shape, *, overlapped: bool = False) -> Iterator[Table]:
    """Two copies of the weights, entered from both ends: the shortest way in; overlapped=True joins F and B."""
    half = max((shape.micro_batches + 1) // 2, shape.ranks)
    for rank in range(shape.ranks):
        forth, back = shape.stages_of_rank(rank)
        streams = [(forth, np.arange(0, 2 * half, 2)), (back, np.arange(1, 2 * half, 2))]
        to_middle = min(rank, shape.ranks - 1 - rank)
        near, far = streams if rank < shape.ranks / 2 else reversed(streams)
        table = _row(near, far, shape.ranks // 2 - 1 - to_middle, to_middle + 1, overlapped)
        yield kept(table, table[:, MICRO_BATCH] < shape.micro_batches)


@schedule(
    "dualpipe-v",
    placement=wave,
    stages_per_rank=Stages(2, 2, 2),
    splits_backward=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks + 0.5, micro_batches),
    aliases=("ScheduleDualPipeV",),
)
def dualpipe_v(shape: Shape, *, overlapped: bool = False) -> Iterator[Table]:
    """DualPipe cut in half: one copy of the weights, folded into a V; overlapped=True joins F and B."""
    number = np.arange(max(shape.micro_batches, 2 * shape.ranks))
    for rank in range(shape.ranks):
        down, up = shape.stages_of_rank(rank)
        table = _row((down, number), (up, number), shape.ranks - 1 - rank, rank + 1, overlapped)
        yield kept(table, table[:, MICRO_BATCH] < shape.micro_batches)


Stream = tuple[int, NDArray[np.intp]]
"""A stage and the micro-batches that pass it."""


def _row(near: Stream, far: Stream, ahead: int, behind: int, overlapped: bool) -> Table:
    """The row of a rank, with ``behind`` ranks from where ``near`` enters, itself included, and ``ahead`` ranks between
    it and where both directions meet."""
    count = len(near[1])
    steady = count - 2 * ahead - behind
    near_f = np.split(passes(Kind.F, *near), [2 * ahead, count - steady])
    far_f = np.split(passes(Kind.F, *far), [behind, behind + ahead, count - ahead])
    near_b = np.split(passes(Kind.B, *near), [steady, steady + ahead, count - ahead])
    far_b = np.split(passes(Kind.B, *far), [ahead, ahead + steady, count - behind])
    pair = joined if overlapped else lambda forwards: forwards

    both = alternate(pair(near_f[2]), far_b[1], pair(far_f[2]), near_b[0])
    if ahead == 0 and len(both):
        both[0] = near_f[2][0]  # where the directions meet, the first backward does not wait for a forward
    end = alternate(far_b[3], near_b[2])
    split = _as(Kind.I, in_order(end[behind:], near_b[3]))
    weights = _as(Kind.W, split)
    return in_order(
        near_f[0],
        alternate(near_f[1], far_f[0]),
        alternate(_as(Kind.I, far_b[0]), _as(Kind.W, far_b[0]), far_f[1]),
        both,
        alternate(far_b[2], pair(far_f[3]), near_b[1]),
        end[:behind],
        split[:behind],
        alternate(weights[:ahead], split[behind:]),
        weights[ahead:],
    )


def _as(kind: Kind, table: Table) -> Table:
    """The same passes as another kind."""
    changed = table.copy()
    changed[:, KIND] = KINDS.index(kind)
    return changed
