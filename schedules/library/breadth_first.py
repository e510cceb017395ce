"""Breadth-first: every stage of a rank takes all micro-batches before the next stage does (arXiv 2211.05953).

2 ranks, 4 micro-batches, 2 stages a rank; two characters are a unit of time, 0 is a forward, aaa the backward of
the same, ' marks the rank's second stage:

    rank 0 | 0 1 2 3 0'1'2'3'. . . ddd'ccc'bbb'aaa'ddd ccc bbb aaa
    rank 1 | . 0 1 2 3 0'1'2'3'ddd'ccc'bbb'aaa'ddd ccc bbb aaa . .

A rank changes its stage 2v - 1 times in a step, whatever the number of micro-batches: where weights are sharded, they
are gathered that often. Step time as that of interleaved 1F1B, with 2(p - 1) hops instead of 2(pv - 1), for all of the
activations: m micro-batches. Backwards run in reverse order, so gradients are sums in another order than one process
has.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.action import Kind
from schedules.placement import loop
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table, in_order, passes


@schedule(
    "breadth-first",
    placement=loop,
    stages_per_rank=Stages(default=2),
    peak=lambda ranks, stages_per_rank, micro_batches: micro_batches,
    aliases=("ScheduleLoopedBFS", "looped-bfs"),
)
def breadth_first(shape: Shape) -> Iterator[Table]:
    """All micro-batches stage after stage, and back in reverse: few changes of stage, for sharded weights."""
    micro_batches = range(shape.micro_batches)
    for rank in range(shape.ranks):
        stages = shape.stages_of_rank(rank)
        yield in_order(
            *(passes(Kind.F, stage, micro_batches) for stage in stages),
            *(passes(Kind.B, stage, micro_batches[::-1]) for stage in reversed(stages)),
        )
