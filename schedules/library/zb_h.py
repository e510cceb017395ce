"""ZB-H1 and ZB-H2: 1F1B with a split backward, whose W fills what would be bubbles (arXiv 2401.10241).

4 ranks, 6 micro-batches; two characters are a unit of time, 0 is a forward, a the gradient of its input, A that of its
weights:

    rank 0 | 0 1 2 3 . . . a A 4 b B 5 c C d D e E f F
    rank 1 | . 0 1 2 . . a 3 b A 4 c B 5 d C e D f E F
    rank 2 | . . 0 1 . a 2 b 3 c A 4 d B 5 e C f D E F
    rank 3 | . . . 0 a 1 b 2 c 3 d A 4 e B 5 f C D E F

ZB-H1 keeps 1F1B's forwards and lets up to r W wait on rank r, so that every rank holds p micro-batches. Its bubble is
(p - 1)(F + I - W + 4c) for W <= min(F, I) and m > p, c being the latency of a hop.

ZB-H2 starts with 2(p - r) - 1 forwards and lets 2r W wait, 7 micro-batches here:

    rank 0 | 0 1 2 3 4 5 6 a A b B c C d D e E f F g G . . .
    rank 1 | . 0 1 2 3 4 a 5 b 6 c A d B e C f D g E F G . .
    rank 2 | . . 0 1 2 a 3 b 4 c 5 d 6 e A f B g C D E F G .
    rank 3 | . . . 0 a 1 b 2 c 3 d 4 e 5 f 6 g A B C D E F G

No rank waits between its own first and last pass while 2W >= F + I + 2c and m >= 2p - 1. Where a step ends in a
barrier, that is worth no more than ZB-H1: rank p - 1 still begins (p - 1)(F + c) late.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedules.action import Kind
from schedules.placement import line
from schedules.registry import ONE, Shape, schedule
from schedules.table import Table, by_slot, passes


@schedule(
    "zb-h1",
    placement=line,
    stages_per_rank=ONE,
    with_more_stages="interleaved-zb",
    splits_backward=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
    aliases=("ZBH1", "zero-bubble"),
)
def zb_h1(shape: Shape) -> Iterator[Table]:
    """Zero bubble in the memory of 1F1B: a third of its bubble is left when F, I and W take the same time."""
    for rank in range(shape.ranks):
        to_go = shape.ranks - rank
        yield split_1f1b(rank, shape.micro_batches, ahead=to_go, waiting=rank)


@schedule(
    "zb-h2",
    placement=line,
    stages_per_rank=ONE,
    with_more_stages="interleaved-zb",
    splits_backward=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(2 * ranks - 1, micro_batches),
    aliases=("ZBH2",),
)
def zb_h2(shape: Shape) -> Iterator[Table]:
    """Zero bubble in twice the memory: no rank waits between its own first and last pass."""
    for rank in range(shape.ranks):
        to_go = shape.ranks - rank
        yield split_1f1b(rank, shape.micro_batches, ahead=2 * to_go - 1, waiting=2 * rank)


def split_1f1b(stage: int, micro_batches: int, ahead: int, waiting: int) -> Table:
    """``ahead`` forwards, then I, W and F in turn; the W of a micro-batch comes ``waiting`` turns after its I."""
    number = np.arange(micro_batches)
    return by_slot(
        (passes(Kind.I, stage, number), 3 * number),
        (passes(Kind.W, stage, number), 3 * (number + waiting) + 1),
        (passes(Kind.F, stage, number), 3 * (number - ahead) + 2),
    )
