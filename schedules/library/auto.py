"""The best schedule that a search finds for given costs and memory; see ``schedules.search``.

3 ranks of which the one in the middle takes twice as long, 5 micro-batches, a unit of time from rank to rank, and the
memory of 1F1B; two characters are a unit of time, 0 is a forward, a the gradient of its input, A that of its weights.
ZB-H1, the best schedule by name, and below it what is found, which meets the bound:

    rank 0 | 0 1 2 . . . . . . . . a A 3 . b B 4 . . . c C . . . . d D . . e E .
    rank 1 | . . 0 1 . . aaa 2 bbb AAA 3 ccc BBB 4 ddd CCC eee DDD EEE
    rank 2 | . . . . . 0 a 1 b . . . . 2 c A . . . 3 d B . . . 4 e C D E . . . .

    rank 0 | 0 1 2 . . . . . . . . a A 3 b B 4 . . . . c C . . d D . . e E .
    rank 1 | . . 0 1 2 aaa bbb AAA BBB 3 ccc 4 ddd CCC eee DDD EEE
    rank 2 | . . . . . 0 a 1 b 2 c A B C . . . . . 3 d D . 4 e E . . . . . .

``costs`` are those of the stages, ranks of different speed and slow links included. Where neither ``stages_per_rank``
nor costs with a number for each stage say how many stages a rank holds, 1 to 4 are tried, and the costs are those of a
rank's whole share: a stage takes 1/v of them. ``memory_cap`` is what a rank may hold in micro-batches of its whole
share, one number or one a rank, p unless given; ``memory_bytes`` is the same in bytes, for costs that know them.
``metric`` "span" makes the longest span of a rank short, for steps that do not end in a barrier. ``placement`` line,
loop or wave leaves the others out. ``polish`` lets OR-tools improve small schedules (the extra ``search``).
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.costs import Costs
from schedules.greedy import Metric
from schedules.registry import CHOSEN, Shape, Stages, schedule
from schedules.schedule import Schedule


@schedule(
    "auto",
    stages_per_rank=Stages(CHOSEN),
    splits_backward=True,
    chooses=True,
    peak=lambda ranks, stages_per_rank, micro_batches: min(ranks, micro_batches),
)
def auto(
    shape: Shape,
    *,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    memory_bytes: float | Sequence[float] | None = None,
    metric: Metric = "makespan",
    placement: str | None = None,
    polish: bool = False,
) -> Schedule:
    """The shortest schedule that a search finds for the costs and the memory there is."""
    from schedules.search import search, task_for  # it begins with every schedule by name, this file's among them

    task = task_for(
        shape.ranks,
        shape.micro_batches,
        shape.stages_per_rank or None,
        costs=costs,
        memory_cap=memory_cap,
        memory_bytes=memory_bytes,
        metric=metric,
        placement=placement,
        polish=polish,
    )
    return search(task).schedule
