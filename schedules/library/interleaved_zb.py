"""Interleaved 1F1B with a split backward (torch's InterleavedZeroBubble; GIS of arXiv 2503.01328).

4 ranks, 4 micro-batches, 2 stages a rank; two characters are a unit of time, 0 is a forward, a the gradient of its
input, A that of its weights, ' marks the rank's second stage:

    rank 0 | 0 1 2 3 0'1'2'3'. . . a'A'b'B'c'C'd'D'a A b B c C d D
    rank 1 | . 0 1 2 3 0'1'2'. . a'3'b'A'c'B'd'C'a D'b A c B d C D
    rank 2 | . . 0 1 2 3 0'1'. a'2'b'3'c'A'd'B'a C'b D'c A d B C D
    rank 3 | . . . 0 1 2 3 0'a'1'b'2'c'3'd'A'a B'b C'c D'd A B C D

Micro-batches take turns in the groups of interleaved-1f1b. Since I comes back sooner than a whole backward, rank r runs
p - 1 - r fewer forwards ahead, and lets r W wait: every rank holds p micro-batches, when p divides their number. The
bubble is then (p - 1)(F + I - W)/v + (4(p - 1) + (v - 1)p)c for W <= min(F, I) and 2c <= W/v, F, I, W being the
times of a rank's whole share and c the latency of a hop. With one stage a rank it is ZB-H1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedules.action import Kind
from schedules.library.interleaved_1f1b import groups
from schedules.placement import loop
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table, by_slot, in_order, passes


def peak(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """What every rank holds at most, in micro-batches of its whole share."""
    ahead = (stages_per_rank - 1) * len(groups(ranks, micro_batches)[0])
    return min((ahead + ranks) / stages_per_rank, micro_batches)


@schedule(
    "interleaved-zb",
    placement=loop,
    stages_per_rank=Stages(default=2),
    splits_backward=True,
    peak=peak,
    aliases=("ScheduleInterleavedZeroBubble",),
)
def interleaved_zb(shape: Shape) -> Iterator[Table]:
    """Zero bubble with several stages a rank: what is left of the bubble shrinks with their number."""
    turns = groups(shape.ranks, shape.micro_batches)
    slot = np.arange(shape.stages_per_rank * shape.micro_batches)
    for rank in range(shape.ranks):
        stages = shape.stages_of_rank(rank)
        ahead = (shape.stages_per_rank - 1) * len(turns[0]) + shape.ranks - 1 - rank
        forwards, *backwards = (
            in_order(*(passes(kind, stage, turn) for turn in turns for stage in order))
            for kind, order in ((Kind.F, stages), (Kind.I, stages[::-1]), (Kind.W, stages[::-1]))
        )
        yield by_slot(
            (forwards, 3 * (slot - ahead)),
            (backwards[0], 3 * slot + 1),
            (backwards[1], 3 * (slot + rank) + 2),
        )
