"""ZB-V: the pipeline folded into a V, first and last stage on one rank (arXiv 2401.10241, section 6).

4 ranks, 7 micro-batches; two characters are a unit of time, 0 is a forward, a the gradient of its input, A that of its
weights, ' marks the rank's second stage:

    rank 0 | 0 1 2 3 4 5 6 0'a'A'1'b'B'2'c'C'3'd'D'a A 4'e'E'b B 5'f'F'c C 6'g'G'd D e E f F g G . . .
    rank 1 | . 0 1 2 3 4 0'5 1'a'A'2'b'B'3'c'C'6 a A 4'd'D'b B 5'e'E'c C 6'f'F'd g'e D f E g F G'G . .
    rank 2 | . . 0 1 2 0'3 1'4 2'a'A'3'b'B'5 a A 4'c'C'6 b B 5'd'D'c C 6'e'E'd f'e g'f D g E F'G'F G .
    rank 3 | . . . 0 0'1 1'2 2'3 3'a'A'4 a A 4'b'B'5 b B 5'c'C'6 c C 6'd'D'd e'e f'f g'g D E'F'G'E F G

Rank r holds stages r and 2p - 1 - r, so the last stage is on the rank of the first, and a micro-batch is back early. No
rank waits between its own first and last pass when F = I = W, there are 2p - 1 micro-batches or more and links cost
nothing; p micro-batches are held on every rank. A step that ends in a barrier loses the (p - 1)F/2 before rank p - 1
begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from schedules.action import Kind
from schedules.placement import wave
from schedules.registry import Shape, Stages, schedule
from schedules.table import MICRO_BATCH, Table, alternate, by_slot, in_order, kept, passes


@schedule(
    "zb-v",
    placement=wave,
    stages_per_rank=Stages(2, 2, 2),
    splits_backward=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
    aliases=("ScheduleZBVZeroBubble", "ZBV"),
)
def zb_v(shape: Shape) -> Iterator[Table]:
    """Zero bubble in the memory of 1F1B, the same on all ranks, when F, I and W take the same time."""
    # The order is one for 2p - 1 micro-batches or more; of a legal order, any part of the micro-batches is one.
    micro_batches = max(shape.micro_batches, 2 * shape.ranks - 1)
    for rank in range(shape.ranks):
        down, up = shape.stages_of_rank(rank)
        table = _row(down, up, shape.ranks - rank, shape.ranks, np.arange(micro_batches))
        yield kept(table, table[:, MICRO_BATCH] < shape.micro_batches)


def _row(down: int, up: int, to_go: int, ranks: int, number: NDArray[np.intp]) -> Table:
    """The row of a rank with ``to_go`` ranks from it to the turn of the V, both included."""
    forth, before = 2 * to_go - 1, ranks - to_go
    first, second = passes(Kind.F, down, number), passes(Kind.F, up, number)
    # From here on a turn of six: F, I, W of the first stage and of the second, the W falling behind in the end.
    last = len(number)
    late = last - ranks
    first_w = np.where(number < late, 6 * number, 6 * (number + before)) + 2
    first_w[late + to_go :] = 6 * last + 1
    second_w = 6 * (number - to_go) + 5
    second_w[late + to_go :] = 6 * last
    return in_order(
        first[:forth],
        alternate(second[:before], first[forth : forth + before]),
        by_slot(
            (first[forth + before :], 6 * (number[forth + before :] - forth - before)),
            (passes(Kind.I, down, number), 6 * number + 1),
            (passes(Kind.W, down, number), first_w),
            (second[before:], 6 * (number[before:] - ranks) + 3),
            (passes(Kind.I, up, number), 6 * (number - to_go) + 4),
            (passes(Kind.W, up, number), second_w),
        ),
    )
