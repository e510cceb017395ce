"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in smaller steps (arXiv 2104.04473).

4 ranks, 4 micro-batches, 2 stages a rank; two characters are a unit of time, 0 is a forward, aaa the backward of
the same, ' marks the rank's second stage:

    rank 0 | 0 1 2 3 0'1'2'3'. . . . . . aaa'. bbb'. ccc'. ddd'aaa bbb ccc ddd
    rank 1 | . 0 1 2 3 0'1'2'3'. . . aaa'. bbb'. ccc'. ddd'aaa bbb ccc ddd . .
    rank 2 | . . 0 1 2 3 0'1'2'. aaa'3'bbb'. ccc'. ddd'aaa bbb ccc ddd . . . .
    rank 3 | . . . 0 1 2 3 0'aaa'1'bbb'2'ccc'3'ddd'aaa bbb ccc ddd . . . . . .

Micro-batches take turns in groups: each group passes all stages of a rank before the next one starts. Rank r
runs 2(p - 1 - r) + (v - 1)g forwards ahead, g being the size of the largest group, and then alternates.

A group of fewer than p micro-batches comes back to a rank before its first one has been round the loop. As a short
*last* group, which is what is left over when p does not divide m, it makes ranks wait for each other, and with
(p, m, v) = (4, 5, 3) for ever. So there are max(1, m // p) groups, as even as can be, and none is short unless m
itself is. Where m // p divides m these are the groups of torch, and where p does, those of the paper.

Step time for every m, F and B being the times of a rank's whole share: (F + B)/v ((v - 1) max(m, p) + m + p - 1).
Rank 0 holds ((v - 1)g + 2(p - 1) + 1)/v micro-batches at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from schedules.action import Kind
from schedules.library.one_f_one_b import ahead_then_alternate
from schedules.placement import loop
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table, in_order, passes


def groups(ranks: int, micro_batches: int) -> list[NDArray[np.intp]]:
    """The micro-batches of each turn, the larger turns first: [0..6], [7..12] for 6 ranks and 13."""
    return np.array_split(np.arange(micro_batches), max(1, micro_batches // ranks))


def peak(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """The most that rank 0 holds, in micro-batches of its whole share."""
    most = _ahead(ranks, stages_per_rank, micro_batches, rank=0) + 1
    return min(most / stages_per_rank, micro_batches)


@schedule(
    "interleaved-1f1b",
    placement=loop,
    stages_per_rank=Stages(default=2),
    peak=peak,
    aliases=("ScheduleInterleaved1F1B",),
)
def interleaved_1f1b(shape: Shape) -> Iterator[Table]:
    """1F1B with several stages a rank: a smaller bubble for a little more memory."""
    turns = groups(shape.ranks, shape.micro_batches)
    for rank in range(shape.ranks):
        stages = shape.stages_of_rank(rank)
        forwards = in_order(*(passes(Kind.F, stage, turn) for turn in turns for stage in stages))
        backwards = in_order(*(passes(Kind.B, stage, turn) for turn in turns for stage in reversed(stages)))
        ahead = _ahead(shape.ranks, shape.stages_per_rank, shape.micro_batches, rank)
        yield ahead_then_alternate(forwards, backwards, ahead)


def _ahead(ranks: int, stages_per_rank: int, micro_batches: int, rank: int) -> int:
    """How many forwards a rank runs before it alternates."""
    to_go = ranks - 1 - rank
    if stages_per_rank == 1:
        return to_go  # 1F1B: a backward is back before the pipeline has taken in another micro-batch
    return 2 * to_go + (stages_per_rank - 1) * len(groups(ranks, micro_batches)[0])
