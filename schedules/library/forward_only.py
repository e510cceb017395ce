"""Forward-only, for evaluation and inference: micro-batches stream through and nothing waits for a backward.

4 ranks, 4 micro-batches, 2 stages a rank; a number is a forward, ' marks the rank's second stage:

    rank 0 | 0 1 2 3 0'1'2'3'. . .
    rank 1 | . 0 1 2 3 0'1'2'3'. .
    rank 2 | . . 0 1 2 3 0'1'2'3'.
    rank 3 | . . . 0 1 2 3 0'1'2'3'

With several stages a rank, micro-batches take turns in groups, as in interleaved-1f1b: a group goes through all
stages before the next one starts, so that little waits between two stages of a rank. Step time, F being the time
of one stage: F ((v - 1) max(m, p) + m + p - 1).
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.action import Kind
from schedules.library.interleaved_1f1b import groups
from schedules.placement import loop
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table, in_order, passes


@schedule(
    "forward-only",
    placement=loop,
    stages_per_rank=Stages(default=1),
    peak=lambda ranks, stages_per_rank, micro_batches: 1 / stages_per_rank,
    aliases=("_ScheduleForwardOnly",),
)
def forward_only(shape: Shape) -> Iterator[Table]:
    """Forwards alone, for evaluation and inference."""
    turns = groups(shape.ranks, shape.micro_batches)
    for rank in range(shape.ranks):
        stages = shape.stages_of_rank(rank)
        yield in_order(*(passes(Kind.F, stage, group) for group in turns for stage in stages))
