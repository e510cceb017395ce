"""1F1B: a forward and a backward in turn, from the first backward on (PipeDream-Flush, arXiv 2006.09503).

4 ranks, 6 micro-batches; two characters are a unit of time, 0 is a forward, aaa the backward of the same:

    rank 0 | 0 1 2 3 . . . . . . aaa 4 bbb 5 ccc . ddd . eee . fff
    rank 1 | . 0 1 2 . . . . aaa 3 bbb 4 ccc 5 ddd . eee . fff . .
    rank 2 | . . 0 1 . . aaa 2 bbb 3 ccc 4 ddd 5 eee . fff . . . .
    rank 3 | . . . 0 aaa 1 bbb 2 ccc 3 ddd 4 eee 5 fff . . . . . .

Rank r runs p - 1 - r forwards ahead and then alternates, so it holds p - r micro-batches at most, however many
there are. Step time: (F + B)(m + p - 1), that of GPipe. Latency costs it more than GPipe: in the steady state
every p micro-batches wait for 2(p - 1) hops.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.action import Kind
from schedules.placement import line
from schedules.registry import ONE, Shape, schedule
from schedules.table import Table, alternate, in_order, passes


@schedule(
    "1f1b",
    placement=line,
    stages_per_rank=ONE,
    with_more_stages="interleaved-1f1b",
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
    aliases=("Schedule1F1B", "PipeDream-Flush"),
)
def one_f_one_b(shape: Shape) -> Iterator[Table]:
    """One forward, one backward: as fast as GPipe with far less memory."""
    for rank in range(shape.ranks):
        forwards = passes(Kind.F, rank, range(shape.micro_batches))
        backwards = passes(Kind.B, rank, range(shape.micro_batches))
        yield ahead_then_alternate(forwards, backwards, ahead=shape.ranks - 1 - rank)


def ahead_then_alternate(forwards: Table, backwards: Table, ahead: int) -> Table:
    """``ahead`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    left = len(forwards) - ahead
    return in_order(forwards[:ahead], alternate(forwards[ahead:], backwards[:left]), backwards[left:])
