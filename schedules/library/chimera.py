"""Chimera: two pipelines in opposite directions, each 1F1B, that fit into each other (arXiv 2107.06925).

4 ranks, 8 micro-batches; two characters are a unit of time, 0 is a forward, a the backward of the same, as long as
the forward, ' marks the stages of the copy that is entered at the last rank:

    rank 0 | 0 2 . 1'b'3'd'a 4 c 6 5'f'7'h'e . g
    rank 1 | . 0 1'2 3'b'a d'c 4 5'6 7'f'e h'g .
    rank 2 | . 1'0 3'2 a b'c d'5'4 7'6 e f'g h'.
    rank 3 | 1'3'. 0 a 2 c b'5'd'7'4 e 6 g f'. h'

Even micro-batches enter at rank 0, odd ones at rank p - 1, in turns of p/2 each. If forwards and backwards take the
same time, those of one direction fall into every other slot, those of the other between them, and the next turn follows
without a gap: the bubble is (p - 2)F when p divides m, against 2(p - 1)F of 1F1B. If backwards take longer, every turn
adds to it. Ranks hold from p/2 + 1 to p micro-batches, the outer ones fewest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedules.action import Kind
from schedules.placement import both_ways
from schedules.registry import EVEN_RANKS, Shape, Stages, schedule
from schedules.table import Table, by_slot, passes


@schedule(
    "chimera",
    placement=both_ways,
    stages_per_rank=Stages(2, 2, 2),
    ranks=EVEN_RANKS,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
)
def chimera(shape: Shape) -> Iterator[Table]:
    """Two copies of the weights, 1F1B from both ends at once: half the bubble of 1F1B in as much memory."""
    half = shape.ranks // 2
    for rank in range(shape.ranks):
        parts = []
        for way, stage in enumerate(shape.stages_of_rank(rank)):
            numbers = np.arange(way, shape.micro_batches, 2)
            before = (rank, shape.ranks - 1 - rank)[way]  # ranks that its micro-batches pass first
            turn, place = np.divmod(np.arange(len(numbers)), half)
            begin = 2 * shape.ranks * turn + 2 * place
            parts.append((passes(Kind.F, stage, numbers), begin + before))
            parts.append((passes(Kind.B, stage, numbers), begin + 2 * shape.ranks - 1 - before))
        yield by_slot(*parts)
