"""1F1B: one forward, one backward, as soon as the first backward is there (PipeDream-flush, arXiv
2006.09503).

    4 ranks, 6 micro-batches; digits are forwards, letters are backwards of micro-batches a = 0, b = 1, ...

    rank 0 | 0 1 2 3       .    .   aa 4 bb 5 cc   dd   ee   ff
    rank 1 |   0 1 2     .    aa 3  bb 4 cc 5 dd   ee   ff
    rank 2 |     0 1   aa 2 bb 3    cc 4 dd 5 ee   ff
    rank 3 |       0 aa 1 bb 2 cc   3 dd 4 ee 5 ff

Rank r runs p - 1 - r forwards ahead and then alternates, so it holds p - r micro-batches at most, however
many there are. The bubble is that of GPipe: (p - 1)(F + B). Latency hurts it more than GPipe: in the steady
state every p micro-batches wait for 2(p - 1) hops.
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
