"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

4 ranks, 4 micro-batches; two characters are a unit of time, 0 is a forward, aaa the backward of the same:

    rank 0 | 0 1 2 3 . . . . . . . . . aaa bbb ccc ddd
    rank 1 | . 0 1 2 3 . . . . . . aaa bbb ccc ddd . .
    rank 2 | . . 0 1 2 3 . . . aaa bbb ccc ddd . . . .
    rank 3 | . . . 0 1 2 3 aaa bbb ccc ddd . . . . . .

The simplest order, and the one that others are held against: its bubble is (p - 1)(F + B), and it keeps all m
micro-batches alive. With v stages a rank, stage s on rank s mod p, all micro-batches pass a rank's first stage,
then its second, and back in reverse:

    rank 0 | 0 1 2 3 0'1'2'3'. . . aaa'bbb'ccc'ddd'aaa bbb ccc ddd
    rank 1 | . 0 1 2 3 0'1'2'3'aaa'bbb'ccc'ddd'aaa bbb ccc ddd . .

Step time, F and B being the times of a rank's whole share: (F + B)/v ((v - 1) max(m, p) + m + p - 1).
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.action import Kind
from schedules.placement import loop
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table, in_order, passes


@schedule(
    "gpipe",
    placement=loop,
    stages_per_rank=Stages(default=1),
    peak=lambda ranks, stages_per_rank, micro_batches: micro_batches,
    aliases=("ScheduleGPipe",),
)
def gpipe(shape: Shape) -> Iterator[Table]:
    """All forwards, then all backwards."""
    micro_batches = range(shape.micro_batches)
    for rank in range(shape.ranks):
        stages = shape.stages_of_rank(rank)
        yield in_order(
            *(passes(Kind.F, stage, micro_batches) for stage in stages),
            *(passes(Kind.B, stage, micro_batches) for stage in reversed(stages)),
        )
