"""List scheduling: given orders of F and I are timed for given costs, and every W goes where it costs least.

Each rank follows its order. Where the next pass has to wait, the rank runs a W that is due, if the gap is long enough,
or pulls forward a later pass that is ready, if the rest of the order still fits the memory after it. Where memory is
full, W makes room. The W that are left come at the end.

Passes are numbers here. A *lane* is one kind of pass on one stage: stage s is lane s for F, stages + s for I and
2 stages + s for W; pass number lane * micro_batches + micro_batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, NamedTuple

import numpy as np

from schedules.costs import Costs
from schedules.placement import Placement
from schedules.table import KIND, MICRO_BATCH, STAGE, F, I, Table, W

EPSILON = 1e-9
"""To this, sums of times and of memory are compared."""

WINDOW = 32
"""How many passes ahead a rank looks for one to pull."""


Metric = Literal["makespan", "span"]
"""What to make short: the step, or the longest span of a rank from its own first start to its own last end."""

Orders = Sequence[Sequence[int]]
"""For each rank the numbers of its F and I, in an order in which it may run them."""


class Rules(NamedTuple):
    """What a rank does in a gap."""

    fill: float = 1.0
    """Run a W that is due in a gap of at least this part of its time."""
    pull: float = math.inf
    """Pull a pass forward in a gap of at least this part of its time; infinite: never."""
    weights_first: bool = True
    """Whether W has its turn before pulling."""


RULES = (
    *(Rules(fill, pull, first) for fill, pull, first in product((0.0, 0.5, 1.0), (0.5, 1.0), (True, False))),
    *(Rules(fill) for fill in (0.0, 0.5, 1.0)),
)
"""Each of them is best for some order, costs and memory."""


class Arranged(NamedTuple):
    """A finished arrangement."""

    rows: list[list[int]]
    """The numbers of all passes of each rank, in order."""
    score: float
    """The step time, or what ``Lanes.lead`` makes of it."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The constants of a task, in lists because single items are read."""

    stages: int
    micro_batches: int
    rank: list[int]
    """Of each lane of F and I."""
    seconds: list[float]
    """Of each lane, W included."""
    follows: list[int]
    """The lane that takes in the result of each lane of F and I, or -1."""
    delay: list[float]
    """How long that result travels."""
    waits: list[float]
    """How long at least each lane waits for its input if that is not even begun."""
    change: list[float]
    """By how much each lane, W included, changes what its rank holds: F takes memory, I and W give it back."""
    lead: list[float]
    """What counts beyond the end of each rank: nothing for the step time; for the longest span of a rank, by how much
    earlier than the last rank it may begin."""

    @staticmethod
    def of(
        placement: Placement, micro_batches: int, costs: Costs, *, metric: Metric = "makespan", in_bytes: bool = False
    ) -> Lanes:
        """The lanes of a placement for given costs; activations of a rank's whole share are 1 unless in bytes."""
        stages, ranks = len(placement.rank_of_stage), max(placement.rank_of_stage) + 1
        by_kind = costs.seconds(placement.rank_of_stage, ranks)
        seconds = np.concatenate([by_kind[F], by_kind[I], by_kind[W]]).tolist()
        travel = costs.travel(stages).tolist()
        follows = [-1] * (2 * stages)
        for route in placement.routes:
            there = [*route, *(stages + stage for stage in reversed(route))]
            for lane, following in pairwise(there):
                follows[lane] = following
        rank = list(placement.rank_of_stage) * 2
        delay, waits = [0.0] * (2 * stages), [0.0] * (2 * stages)
        for lane, after in enumerate(follows):
            if after >= 0:
                sent = lane if lane < stages else after - stages  # an output, or the gradient of one
                delay[lane] = travel[sent] if rank[lane] != rank[after] else 0.0
                waits[after] = seconds[lane] + delay[lane]
        if in_bytes:
            taken, kept = (costs.per_stage(name, stages) for name in ("activation_bytes", "weight_grad_bytes"))
        else:
            taken = np.full(stages, ranks / (max(placement.layer_group_of_stage) + 1))
            kept = taken * costs.per_stage("kept", stages)
        change = np.concatenate([taken, kept - taken, -kept]).tolist()
        lead = [0.0] * ranks
        if metric == "span":
            begins = [0.0] * ranks
            for route in reversed(placement.routes):
                reach = np.cumsum([0.0, *(seconds[stage] + delay[stage] for stage in route)]).tolist()
                for stage, begin in reversed(list(zip(route, reach, strict=False))):
                    begins[rank[stage]] = begin
            lead = [max(begins) - begin for begin in begins]
        return Lanes(stages, micro_batches, rank, seconds, follows, delay, waits, change, lead)


def arrange(lanes: Lanes, orders: Orders, rules: Rules, cap: Sequence[float]) -> Arranged | None:
    """Time the orders; None where they do not fit the memory.

    ``cap`` has one number a rank, in units of ``Lanes.change``.
    """
    run = _Run(lanes, orders, rules, cap)
    return run.arranged() if run.to_the_end() else None


def best(lanes: Lanes, candidates: Iterable[Orders], cap: Sequence[float]) -> Arranged | None:
    """The shortest arrangement of all candidates by all RULES, of equal ones the first; None where none fits.

    Of a very long step only the first rules are tried.
    """
    some = RULES[: max(2, 150_000 // (3 * lanes.stages * lanes.micro_batches))]
    found = (arrange(lanes, orders, rules, cap) for orders in candidates for rules in some)
    return min((one for one in found if one is not None), key=lambda one: one.score, default=None)


class _Run:
    """The state of one arrangement while time passes."""

    __slots__ = (
        "cap", "due", "due_from", "events", "free", "front", "head",
        "lanes", "lanes_of_rank", "live", "orders", "ready", "rows", "rules", "taken",
    )  # fmt: skip

    def __init__(self, lanes: Lanes, orders: Orders, rules: Rules, cap: Sequence[float]) -> None:
        ranks, count = len(orders), 2 * lanes.stages * lanes.micro_batches
        self.lanes, self.orders, self.rules, self.cap = lanes, orders, rules, cap
        self.ready = [math.inf] * count
        self.taken = bytearray(count)
        self.free = [0.0] * ranks
        self.live = [0.0] * ranks
        self.head = [0] * ranks
        self.rows: list[list[int]] = [[] for _ in orders]
        self.due: list[list[int]] = [[] for _ in orders]
        self.due_from = [0] * ranks
        self.front = [lane * lanes.micro_batches for lane in range(2 * lanes.stages)]
        self.lanes_of_rank: list[list[int]] = [[] for _ in orders]
        for lane, rank in enumerate(lanes.rank):
            self.lanes_of_rank[rank].append(lane)
        self.events = [(0.0, rank) for rank in range(ranks)]
        entered = set(lanes.follows)
        for lane in range(lanes.stages):
            if lane not in entered:
                first = lane * lanes.micro_batches
                self.ready[first : first + lanes.micro_batches] = [0.0] * lanes.micro_batches

    def to_the_end(self) -> bool:
        """Whether all of the orders could be run."""
        events, free, step = self.events, self.free, self.step
        while events:
            time, rank = heapq.heappop(events)
            if time >= free[rank]:
                step(rank, time)
        return all(head == len(order) for head, order in zip(self.head, self.orders, strict=True))

    def step(self, rank: int, time: float) -> None:
        """Let a rank that is free do something, if there is something to do."""
        order, head, taken = self.orders[rank], self.head[rank], self.taken
        while head < len(order) and taken[order[head]]:
            head += 1
        self.head[rank] = head
        if head == len(order):
            while self.due_from[rank] < len(self.due[rank]):
                self.run_weights(rank, self.free[rank])
            return
        number = order[head]
        lanes = self.lanes
        lane = number // lanes.micro_batches
        change = lanes.change[lane]
        full = change > 0.0 and self.live[rank] + change > self.cap[rank] + EPSILON
        ready = self.ready[number]
        if ready <= time + EPSILON and not full:
            self.run(rank, number, lane, time)
            return
        gap = math.inf if full else lanes.waits[lane] if ready == math.inf else ready - time
        if self.rules.weights_first and self.fill(rank, time, gap):
            return
        if self.rules.pull < math.inf and self.pull(rank, time, gap):
            return
        if not self.rules.weights_first:
            self.fill(rank, time, gap)

    def fill(self, rank: int, time: float, gap: float) -> bool:
        """Run the oldest W, if one is due and the gap is long enough for it."""
        if self.due_from[rank] == len(self.due[rank]):
            return False
        seconds = self.lanes.seconds[self.due[rank][self.due_from[rank]] // self.lanes.micro_batches]
        if gap < self.rules.fill * seconds - EPSILON:
            return False
        heapq.heappush(self.events, (self.run_weights(rank, time), rank))
        return True

    def run_weights(self, rank: int, time: float) -> float:
        """Run the oldest W; when it ends."""
        lanes, number = self.lanes, self.due[rank][self.due_from[rank]]
        lane = number // lanes.micro_batches
        self.due_from[rank] += 1
        self.rows[rank].append(number)
        self.live[rank] += lanes.change[lane]
        self.free[rank] = time + lanes.seconds[lane]
        return self.free[rank]

    def pull(self, rank: int, time: float, gap: float) -> bool:
        """Run the next pass of the order that is ready and leaves the rest enough memory."""
        lanes, taken, order = self.lanes, self.taken, self.orders[rank]
        could = {lane for lane in self.lanes_of_rank[rank] if self.could_run(lane, time, gap)}
        if not could:
            return False
        due = self.due[rank][self.due_from[rank] :]
        # What the rest of the order needs at least, if every W runs right behind its I.
        needs = self.live[rank] + sum(lanes.change[number // lanes.micro_batches] for number in due)
        most, live, cap = needs, self.live[rank], self.cap[rank] + EPSILON
        for number in order[self.head[rank] : self.head[rank] + WINDOW]:
            if taken[number]:
                continue
            lane = number // lanes.micro_batches
            change, forward = lanes.change[lane], lane < lanes.stages
            if lane in could:
                # A forward is held from now on, while the others before it in the order are run.
                if not forward or max(most, live) + change <= cap:
                    self.run(rank, number, lane, time)
                    return True
                could.remove(lane)
                if not could:
                    return False
            if forward:
                needs += change
                most = max(most, needs)
            else:
                most = max(most, needs + change)
                needs += change + lanes.change[lane + lanes.stages]
        return False

    def could_run(self, lane: int, time: float, gap: float) -> bool:
        """Whether the next pass of a lane is ready, and short enough for the gap."""
        number = self.front[lane]
        return (
            number < (lane + 1) * self.lanes.micro_batches
            and self.ready[number] <= time + EPSILON
            and gap >= self.rules.pull * self.lanes.seconds[lane] - EPSILON
        )

    def run(self, rank: int, number: int, lane: int, time: float) -> None:
        """Run an F or an I, and tell whoever takes in its result."""
        lanes, events = self.lanes, self.events
        end = time + lanes.seconds[lane]
        self.free[rank] = end
        self.taken[number] = 1
        self.front[lane] = number + 1
        self.rows[rank].append(number)
        heapq.heappush(events, (end, rank))
        self.live[rank] += lanes.change[lane]
        if lane >= lanes.stages:
            self.due[rank].append(number + lanes.stages * lanes.micro_batches)
        after = lanes.follows[lane]
        if after >= 0:
            arrival = end + lanes.delay[lane]
            self.ready[number + (after - lane) * lanes.micro_batches] = arrival
            receiver = lanes.rank[after]
            if receiver != rank:
                heapq.heappush(events, (arrival, receiver))
                if self.free[receiver] <= time:
                    heapq.heappush(events, (time, receiver))  # it may know now how long its gap is

    def arranged(self) -> Arranged:
        """The rows and times of a run that has come to its end."""
        return Arranged(self.rows, max(end + lead for end, lead in zip(self.free, self.lanes.lead, strict=True)))


def as_table(lanes: Lanes, numbers: Sequence[int]) -> Table:
    """A row of numbers as a table."""
    lane, micro_batch = np.divmod(np.array(numbers, dtype=np.int32), lanes.micro_batches)
    table = np.zeros((len(numbers), 4), dtype=np.int32)
    table[:, KIND] = np.array((F, I, W))[lane // lanes.stages]
    table[:, STAGE], table[:, MICRO_BATCH] = lane % lanes.stages, micro_batch
    return table
