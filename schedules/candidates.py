"""What the search begins with: every named schedule that fits, and orders with more or less warm-up."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from schedules.costs import Costs
from schedules.critical import Network, Rows
from schedules.errors import ScheduleError
from schedules.greedy import EPSILON, Lanes, Metric
from schedules.orders import blocks, in_blocks, in_turns, of_schedule
from schedules.placement import Placement, PlacementRule, line, loop, wave
from schedules.registry import build, facts, names

LARGE = 20_000
"""Of more passes than this, schedules that are timed for costs are timed with their own memory only."""


class Site:
    """A placement to look at, with the costs of its stages, and what follows from them; made once and kept."""

    def __init__(
        self,
        rule: PlacementRule,
        stages_per_rank: int,
        micro_batches: int,
        costs: Costs,
        cap: Sequence[float],
        metric: Metric,
        in_bytes: bool,
    ) -> None:
        self.name, self.stages_per_rank, self.micro_batches = rule.__name__, stages_per_rank, micro_batches
        self.costs, self.cap, self.in_bytes = costs, tuple(cap), in_bytes
        self.placement: Placement = rule(len(cap), stages_per_rank)
        self.lanes = Lanes.of(self.placement, micro_batches, costs, metric=metric, in_bytes=in_bytes)

    @cached_property
    def network(self) -> Network:
        return Network.of(self.lanes)

    @property
    def ranks(self) -> int:
        return len(self.cap)

    @property
    def passes(self) -> int:
        """How many there are in a step."""
        return 3 * self.lanes.stages * self.micro_batches

    @cached_property
    def most(self) -> list[int]:
        """How many forwards each rank can hold, of its smallest stage."""
        chunks = self.stages_per_rank * self.micro_batches
        found = []
        for rank, cap in enumerate(self.cap):
            smallest = min(self.lanes.change[stage] for stage in self.placement.stages_of_rank(rank))
            found.append(chunks if smallest <= 0 else min(chunks, int((cap + EPSILON) // smallest)))
        return found

    def fits(self, rows: Rows) -> bool:
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
    rows: Rows
    """With W: the rows of a named schedule. Without: an order that is still to be arranged."""


def rules_for(ranks: int, stages_per_rank: int) -> tuple[PlacementRule, ...]:
    """The placements that keep one copy of the weights."""
    return (line,) if stages_per_rank == 1 else (loop,) if ranks == 1 else (loop, wave)


def named(site: Site) -> Iterator[Seed]:
    """Every schedule by name that has this placement and fits the memory."""
    for name in names():
        known = facts(name)
        if known.chooses or not known.stages_per_rank.allow(site.stages_per_rank):
            continue
        if known.place(site.ranks, site.stages_per_rank) != site.placement:
            continue
        for options in _options(site, known.options):
            try:
                made = build(
                    name,
                    ranks=site.ranks,
                    micro_batches=site.micro_batches,
                    stages_per_rank=site.stages_per_rank,
                    **options,
                )
            except ScheduleError:  # it needs another shape, or more memory
                continue
            if made.forward_only:
                break
            rows = of_schedule(made)
            if site.fits(rows):
                yield Seed(name, rows)


def _options(site: Site, known: Container[str]) -> list[dict[str, object]]:
    """The ways to build a schedule: as it is and, where it can be, timed for the costs and for the memory."""
    ways: list[dict[str, object]] = [{}]
    if "costs" in known:
        ways.append({"costs": site.costs})
        if "memory_cap" in known and not site.in_bytes and site.passes <= LARGE:
            ways.append({"costs": site.costs, "memory_cap": min(site.cap)})
    return ways


def orders(site: Site) -> Iterator[Seed]:
    """Orders to arrange: turns with more or less warm-up, in a V also blocks; the most promising ones first."""
    p, v, m = site.ranks, site.stages_per_rank, site.micro_batches
    seen = set()
    for share, more in ((2, 1), (1, 1), (1, max(3, p // 2)), (1, 0), (1.5, 0), (1, 2), (2, -1)):
        for turn in _turns(site):
            ahead = [
                min(most, (v - 1) * turn + max(1, int(share * (p - rank)) + more))
                for rank, most in enumerate(site.most)
            ]
            key = (turn, *ahead)
            if key not in seen:
                seen.add(key)
                yield Seed(f"turns of {turn}, {ahead[0]} ahead", in_turns(site.placement, m, turn, ahead))
    if site.name == "wave" and v == 2:
        fitting = sorted(blocks(p, min(site.most)), key=lambda block: (-sum(block[:4]), block))
        for block in fitting[:: max(1, len(fitting) // 6)]:
            yield Seed("blocks {} {} {} {} in a V".format(*block[:4]), in_blocks(block, 6, p, m))


def _turns(site: Site) -> list[int]:
    """How many micro-batches may take a turn: as many as ranks, more on slow links, fewer in little memory."""
    p, v = site.ranks, site.stages_per_rank
    if v == 1:
        return [site.micro_batches]
    stages = site.lanes.stages
    forward, travel = sum(site.lanes.seconds[:stages]), sum(site.lanes.delay[:stages])
    slow = p * (1 + travel / forward) if forward else p
    most = max(1, (min(site.most) - 1) // (v - 1))
    wanted = [p, round((p + slow) / 2), round(slow), -(-3 * p // 4), -(-p // 2), most if most < p else p]
    return sorted({min(site.micro_batches, most, max(1, turn)) for turn in wanted}, key=lambda turn: abs(turn - p))


def one_at_a_time(site: Site) -> Seed:
    """A micro-batch passes before the next one starts: what needs the least memory."""
    ahead = [site.stages_per_rank] * site.ranks
    return Seed("one micro-batch at a time", in_turns(site.placement, site.micro_batches, 1, ahead))
