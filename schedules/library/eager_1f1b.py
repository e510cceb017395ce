"""1F1B that starts early: twice as many forwards ahead, so that no message is waited for (arXiv 2211.05322).

4 ranks, 6 micro-batches; two characters are a unit of time, 0 is a forward, aaa the backward of the same:

    rank 0 | 0 1 2 3 4 5 . . . . aaa . bbb . ccc . ddd . eee . fff
    rank 1 | . 0 1 2 3 4 . . aaa 5 bbb . ccc . ddd . eee . fff . .
    rank 2 | . . 0 1 2 . aaa 3 bbb 4 ccc 5 ddd . eee . fff . . . .
    rank 3 | . . . 0 aaa 1 bbb 2 ccc 3 ddd 4 eee 5 fff . . . . . .

Rank r runs 2(p - 1 - r) forwards ahead, and rank 0 holds 2p - 1 micro-batches. Step time, c being the latency of a hop:
(F + B)(m + p - 1) + 2(p - 1)c. 1F1B pays 2(p - 1)c for every p micro-batches, since each waits for a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.action import Kind
from schedules.library.one_f_one_b import ahead_then_alternate
from schedules.placement import line
from schedules.registry import ONE, Shape, schedule
from schedules.table import Table, passes


@schedule(
    "1f1b-eager",
    placement=line,
    stages_per_rank=ONE,
    with_more_stages="interleaved-1f1b",
    peak=lambda ranks, stages_per_rank, micro_batches: min(2 * ranks - 1, micro_batches),
    aliases=("eager-1f1b",),
)
def eager_1f1b(shape: Shape) -> Iterator[Table]:
    """1F1B with twice the forwards ahead: slow links cost as little as in GPipe, for almost twice the memory."""
    for rank in range(shape.ranks):
        forwards = passes(Kind.F, rank, range(shape.micro_batches))
        backwards = passes(Kind.B, rank, range(shape.micro_batches))
        yield ahead_then_alternate(forwards, backwards, ahead=2 * (shape.ranks - 1 - rank))
