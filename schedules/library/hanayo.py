"""Hanayo: the pipeline folded into waves, so that a rank's stages meet where one turns (arXiv 2308.15762).

4 ranks, 4 micro-batches, 2 stages a rank; two characters are a unit of time, 0 is a forward, a the backward of the
same, as long as the forward, ' marks the rank's second stage:

    rank 0 | 0 1 2 3 . . . 0'a'1'b'2'c'3'd'a . b . c . d
    rank 1 | . 0 1 2 . . 0'3 1'a'2'b'3'c'a d'b . c . d .
    rank 2 | . . 0 1 . 0'2 1'3 2'a'3'b'a c'b d'c . d . .
    rank 3 | . . . 0 0'1 1'2 2'3 3'a'a b'b c'c d'd . . .

Micro-batches run in turns of p. Each stage takes one every other slot of F; with forwards and backwards that take the
same time, the rank's other stages and the next turn fit between, for any number of stages a rank. The bubble is then
(p - 1)(F + B)/v when p divides m, that of interleaved 1F1B, with p micro-batches held. If backwards take longer, every
turn adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedules.action import Kind
from schedules.placement import wave
from schedules.registry import Shape, Stages, schedule
from schedules.table import Table, by_slot, passes


@schedule(
    "hanayo",
    placement=wave,
    stages_per_rank=Stages(default=2),
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
    aliases=("wave",),
)
def hanayo(shape: Shape) -> Iterator[Table]:
    """Stages in waves, one copy of the weights: Chimera's order without its second copy."""
    stages = shape.ranks * shape.stages_per_rank
    numbers = np.arange(shape.micro_batches)
    turn, place = np.divmod(numbers, shape.ranks)
    enter = 2 * stages * turn + 2 * place
    for rank in range(shape.ranks):
        parts = []
        for stage in shape.stages_of_rank(rank):
            parts.append((passes(Kind.F, stage, numbers), enter + stage))
            parts.append((passes(Kind.B, stage, numbers), enter + 2 * stages - 1 - stage))
        yield by_slot(*parts)
