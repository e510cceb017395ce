"""Predicting: the timeline that a schedule or a program has under given costs.

Everything that takes time is a node of some row; nodes of a row run one after the other and wait for nodes of other
rows. Each rank has a row of passes; beside it, if they take time, a row of what it shares with replicas, and each link
a row of messages if these have to wait for each other. One search for longest paths times them all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.costs import Costs
from schedules.earliest import Times, earliest
from schedules.lower import lower
from schedules.messages import messages, slots
from schedules.program import ACTION, CODE, OP, OPS, PASSES, Op, Program
from schedules.schedule import Schedule
from schedules.table import KIND, STAGE, F
from schedules.timeline import Span, Timeline

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

SHARED = {CODE[Op.UNSHARD]: "unshard", CODE[Op.RESHARD]: "reshard", CODE[Op.REDUCE_GRAD]: "reduce"}
"""What a rank does together with its replicas, and the name of its cost."""

NOBODY = -1


def simulate(work: Schedule | Program, costs: Costs | None = None) -> Timeline:
    """Run every entry as soon as its rank and its inputs are there; unit costs unless given.

    A Pair takes as long as its two actions. UNSHARD, RESHARD and REDUCE_GRAD of a rank go on beside its passes, one
    after the other; each starts when the pass before it in the row has ended, and the passes of a stage wait until its
    parameters are whole. The steps begin on all ranks at once when all gradients are there, since whether to step is
    for all to agree. A schedule is lowered where any of these takes time.

    Raises CostError when costs are given for another number of stages or ranks, IllegalSchedule or DeadlockError for
    a schedule that cannot run to its end.
    """
    costs = costs or Costs()
    schedule = work.schedule if isinstance(work, Program) else work
    travel = _travel(schedule, costs)
    shared = links = None
    if costs.collectives:
        shared = _shared(work if isinstance(work, Program) else lower(work), costs)
    if costs.contention and np.isfinite(costs.bandwidth):
        links = _links(schedule, costs)

    passes, *beside = _times(schedule, costs, travel, [one for one in (shared, links) if one is not None])
    other: list[Span] = []
    whole = None
    if shared is not None:
        whole = _whole(shared, beside[0], len(passes.end))
        other += [*_spans(shared, beside[0]), *_steps(shared, passes, beside[0], costs, schedule.ranks)]
    if links is not None:
        travel = travel.copy()
        travel[links.line, links.waited_by] = beside[-1].end + costs.hop - passes.end[links.after]
        other += _spans(links, beside[-1])
    for array in passes:
        array.setflags(write=False)
    cuts = schedule.entries.starts[1:-1]
    return Timeline(
        schedule, "predicted", tuple(np.split(passes.start, cuts)), tuple(np.split(passes.end, cuts)), tuple(other),
        hop=costs.hop, costs=costs, travel=travel, whole=whole,
    )  # fmt: skip


class _Beside(NamedTuple):
    """Nodes beside the passes, in rows; arrays of shape (nodes,) but for the first."""

    row_starts: Integers
    """The first node of each row, and the number of nodes."""
    after: Integers
    """The entry whose end each waits for, or NOBODY."""
    seconds: Floats
    waited_by: Integers
    """The entry that waits for it, or NOBODY."""
    line: Integers
    """Which of the inputs of that entry it is."""
    delay: float
    """How much later than its end that entry may start."""
    rank: Integers
    what: list[str]
    track: str


def _times(schedule: Schedule, costs: Costs, travel: Floats, groups: list[_Beside]) -> list[Times]:
    """When the passes and the nodes of each group run."""
    entries, senders, actions = schedule.entries, schedule.senders, schedule.actions
    seconds = costs.seconds(schedule.rank_of_stage, schedule.ranks)[actions[:, KIND], actions[:, STAGE]]
    seconds = np.add.reduceat(seconds, entries.first_action) if len(seconds) else seconds
    if not groups:
        return [earliest(entries.starts, senders, travel, seconds, schedule.describe)]

    count = len(seconds)
    ends = count + np.cumsum([len(group.after) for group in groups])
    total = int(ends[-1])
    lines = max(len(senders), *(int(group.line.max(initial=0)) + 1 for group in groups))
    inputs, delay = np.full((lines, total), total), np.zeros((lines, total))
    inputs[: len(senders), :count] = np.where(senders == count, total, senders)
    delay[: len(senders), :count] = travel
    starts = [entries.starts]
    for group, end in zip(groups, ends.tolist(), strict=True):
        nodes = np.arange(end - len(group.after), end)
        behind, awaited = group.after != NOBODY, group.waited_by != NOBODY
        inputs[0, nodes[behind]] = group.after[behind]
        inputs[group.line[awaited], group.waited_by[awaited]] = nodes[awaited]
        delay[group.line[awaited], group.waited_by[awaited]] = group.delay
        starts.append(group.row_starts[1:] + nodes[:1])
    seconds = np.concatenate([seconds, *(group.seconds for group in groups)])
    found = earliest(np.concatenate(starts), inputs, delay, seconds, lambda node: _describe(schedule, groups, node))
    cuts = [count, *ends[:-1].tolist()]
    return [Times(*parts) for parts in zip(*(np.split(array, cuts) for array in found), strict=True)]


def _describe(schedule: Schedule, groups: list[_Beside], node: int) -> str:
    node -= len(schedule.entries.rank)
    if node < 0:
        return schedule.describe(node + len(schedule.entries.rank))
    what = [name for group in groups for name in group.what][node]
    rank = np.concatenate([group.rank for group in groups])[node]
    return f"rank {rank}'s {what}"


# Messages.


def _travel(schedule: Schedule, costs: Costs) -> Floats:
    """How long the messages to each entry travel if none waits for another, shape as ``schedule.senders``."""
    travel = np.zeros(schedule.senders.shape)
    producer, consumer = messages(schedule)
    line, entry = slots(schedule, consumer)
    travel[line, entry] = costs.hop + _seconds_on_link(schedule, costs, producer, consumer)
    return travel


def _seconds_on_link(schedule: Schedule, costs: Costs, producer: Integers, consumer: Integers) -> Floats:
    """How long each message occupies its link: outputs forward, and back the gradients of these."""
    actions = schedule.actions
    sent = np.where(actions[producer, KIND] == F, actions[producer, STAGE], actions[consumer, STAGE])
    seconds: Floats = costs.per_stage("output_bytes", schedule.num_stages)[sent] / costs.bandwidth
    return seconds


def _links(schedule: Schedule, costs: Costs) -> _Beside | None:
    """A row for each pair of ranks, with its messages in the order of sending."""
    producer, consumer = messages(schedule)
    if not len(producer):
        return None
    rank = schedule.rank_of_action
    channel = rank[producer] * schedule.ranks + rank[consumer]
    order = np.lexsort((producer, channel))
    producer, consumer, channel = producer[order], consumer[order], channel[order]
    line, entry = slots(schedule, consumer)
    begins = np.flatnonzero(np.diff(channel, prepend=-1))
    return _Beside(
        row_starts=np.append(begins, len(channel)),
        after=schedule.entries.of_action[producer],
        seconds=_seconds_on_link(schedule, costs, producer, consumer),
        waited_by=entry,
        line=line,
        delay=costs.hop,
        rank=rank[producer],
        what=[
            f"{schedule.action(made)} to {to}"
            for made, to in zip(producer.tolist(), rank[consumer].tolist(), strict=True)
        ],
        track="link",
    )


# What ranks share with replicas.


def _shared(program: Program, costs: Costs) -> _Beside:
    """A row for each rank, with its UNSHARD, RESHARD and REDUCE_GRAD in the order of its program."""
    schedule, table = program.schedule, program.instructions
    entries = schedule.entries
    found = np.flatnonzero(np.isin(table[:, OP], list(SHARED)))
    op, stage = table[found, OP], table[found, ACTION]
    rank = np.searchsorted(program.row_starts, found, side="right") - 1
    pass_of = np.flatnonzero(np.isin(table[:, OP], PASSES))  # by entry
    before = np.searchsorted(pass_of, found) - 1
    seconds = np.zeros(len(found))
    for code, name in SHARED.items():
        seconds[op == code] = costs.per_stage(name, schedule.num_stages)[stage[op == code]]
    # What an I does not leave to its W are biases and the like: next to nothing.
    seconds[(op == CODE[Op.REDUCE_GRAD]) & (table[pass_of[before], OP] == CODE[Op.I])] = 0.0

    waited_by = np.full(len(found), NOBODY, dtype=np.intp)
    for one in np.flatnonzero(op == CODE[Op.UNSHARD]).tolist():
        users = entries.of_action[np.flatnonzero(schedule.actions[:, STAGE] == stage[one])]
        later = np.searchsorted(pass_of[users], found[one])
        if later < len(users):
            waited_by[one] = users[later]
    line = np.full(len(found), len(schedule.senders) + 1)  # the second stage of a Pair
    line[np.unique(waited_by, return_index=True)[1]] -= 1
    return _Beside(
        row_starts=np.searchsorted(found, program.row_starts),
        after=np.where(before >= entries.starts[rank], before, NOBODY),
        seconds=seconds,
        waited_by=waited_by,
        line=line,
        delay=0.0,
        rank=rank,
        what=[f"{OPS[code]} {number}" for code, number in zip(op.tolist(), stage.tolist(), strict=True)],
        track="reduce",
    )


def _whole(shared: _Beside, times: Times, entries: int) -> Floats:
    """When the parameters of each entry's stages are whole, as far as it is the first to use them since."""
    whole = np.full(entries, -np.inf)
    awaited = shared.waited_by != NOBODY
    np.maximum.at(whole, shared.waited_by[awaited], times.end[awaited])
    return whole


def _steps(shared: _Beside, passes: Times, times: Times, costs: Costs, ranks: int) -> list[Span]:
    """The optimizer's steps, which begin when all that comes before has ended on all ranks."""
    begin = max(float(passes.end.max(initial=0.0)), float(times.end.max(initial=0.0)))
    seconds = costs.per_rank("step", ranks).tolist()
    return [Span(rank, "step", "STEP", begin, begin + one) for rank, one in enumerate(seconds) if one > 0]


def _spans(beside: _Beside, times: Times) -> list[Span]:
    """What takes any time, as spans."""
    columns = (beside.rank.tolist(), beside.what, times.start.tolist(), times.end.tolist())
    return [
        Span(rank, beside.track, what, start, end)
        for rank, what, start, end in zip(*columns, strict=True)
        if end > start
    ]
