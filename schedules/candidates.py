"""What the search begins with: every named schedule that fits, and orders with more or less warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedules.costs import Costs
from schedules.critical import Network
from schedules.errors import ScheduleError
from schedules.greedy import EPSILON, Lanes, Metric
from schedules.orders import blocks, in_blocks, in_turns, of_schedule
from schedules.placement import Placement, line, loop, wave
from schedules.registry import build, facts, names

Orders = list[list[int]]


class Site(NamedTuple):
    """A placement to look at, and what follows from it."""

    placement: Placement
    name: str
    stages_per_rank: int
    costs: Costs
    """Of its stages."""
    lanes: Lanes
    network: Network
    cap: tuple[float, ...]
    """What each rank may hold."""

    @property
    def passes(self) -> int:
        """How many there are in a step."""
        return 3 * self.lanes.stages * self.lanes.micro_batches

    def fits(self, rows: Orders) -> bool:
        """Whether every rank keeps to its memory."""
        change = self.network.change
        for row, cap in zip(rows, self.cap, strict=True):
            held = 0.0
            for number in row:
                held += change[number]
                if held > cap + EPSILON:
                    return False
        return True


class Seed(NamedTuple):
    """Where a schedule may come from."""

    name: str
    rows: Orders
    """With W: the rows of a named schedule. Without: an order that is still to be arranged."""
    named: bool = False


def sites(
    ranks: int,
    micro_batches: int,
    choices: Sequence[int],
    costs: Costs,
    cap: Sequence[float],
    metric: Metric,
    in_bytes: bool,
) -> Iterator[Site]:
    """The placements of one route with so many stages a rank."""
    for stages_per_rank in choices:
        own = costs.divided(stages_per_rank) if len(choices) > 1 else costs
        for rule in (line,) if stages_per_rank == 1 or ranks == 1 else (loop, wave):
            placement = rule(ranks, stages_per_rank)
            lanes = Lanes.of(placement, micro_batches, own, metric=metric, in_bytes=in_bytes)
            yield Site(
                placement, rule.__name__, stages_per_rank, own, lanes, Network.of(lanes), tuple(cap)
            )  # fmt: skip


def named(site: Site) -> Iterator[Seed]:
    """Every schedule by name that has this placement and fits the memory."""
    ranks, micro_batches = len(site.cap), site.lanes.micro_batches
    for name in names():
        known = facts(name)
        if known.chooses or not known.stages_per_rank.allow(site.stages_per_rank):
            continue
        if known.place(ranks, site.stages_per_rank) != site.placement:
            continue
        timed: list[dict[str, object]] = [{}]
        if "costs" in known.options:
            timed = [{"costs": site.costs}, {"costs": site.costs, "memory_cap": min(site.cap)}, {}]
        for options in timed:
            try:
                made = build(
                    name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=site.stages_per_rank, **options
                )
            except ScheduleError:  # it needs another shape, or more memory
                continue
            if made.forward_only:
                break
            rows = of_schedule(made)
            if site.fits(rows):
                yield Seed(name, rows, named=True)


def orders(site: Site) -> Iterator[Seed]:
    """Orders to arrange: turns with more or less warm-up, and in a V also blocks."""
    p, v, m = len(site.cap), site.stages_per_rank, site.lanes.micro_batches
    change = site.lanes.change[: site.lanes.stages]
    most = [  # forwards that a rank can hold
        int(min(m * v, (cap + EPSILON) // max(min(change[stage] for stage in site.placement.stages_of_rank(rank)), 1e-12)))
        for rank, cap in enumerate(site.cap)
    ]
    if site.name == "wave" and v == 2:
        fitting = sorted(blocks(p, min(most)), key=lambda block: (-sum(block[:4]), block))
        for block in fitting[:: max(1, len(fitting) // 6)]:
            yield Seed(f"blocks {block[0]} {block[1]} {block[2]} {block[3]} in a V", in_blocks(block, 6, p, m))
    seen = set()
    for turn in _turns(site):
        for share, more in ((1, 0), (1, 1), (1, 2), (1, max(3, p // 2)), (1.5, 0), (2, -1), (2, 1)):
            ahead = [
                min(most[rank], (v - 1) * turn + max(1, int(share * (p - rank)) + more)) for rank in range(p)
            ]
            key = (turn, *ahead)
            if key not in seen:
                seen.add(key)
                yield Seed(f"turns of {turn}, {ahead[0]} ahead", in_turns(site.placement, m, turn, ahead))


def _turns(site: Site) -> list[int]:
    """How many micro-batches may take a turn: as many as there are ranks, more on slow links, fewer in little memory."""
    p, m, v = len(site.cap), site.lanes.micro_batches, site.stages_per_rank
    if v == 1:
        return [m]
    stages = site.lanes.stages
    forward = sum(site.lanes.seconds[:stages]) / stages
    travel = sum(site.lanes.delay[:stages]) / stages
    slow = p * (1 + travel / forward) if forward else p
    wanted = [p, round((p + slow) / 2), round(slow), -(-3 * p // 4), -(-p // 2)]
    return sorted({min(m, max(1, turn)) for turn in wanted}, key=lambda turn: abs(turn - p))
