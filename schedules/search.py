"""The automatic search: candidates are arranged for the costs and the memory, and the best of them improved.

    named schedules that fit ──────────────────────┐
                                                   ├──► the best few ──► improved along the critical path ──► the best
    orders × warm-up ──► arranged by all RULES ────┘

How much is tried is counted in passes and not in seconds, so that every rank of a job finds the same schedule. As soon
as one meets the bound, the search is over. Since named schedules are among the candidates, what is found is never
worse than the best of those that fit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from schedules.bound import bound_on
from schedules.candidates import Seed, Site, named, one_at_a_time, orders, rules_for
from schedules.costs import Costs
from schedules.critical import Rows, times
from schedules.errors import CostError, ImpossibleShape
from schedules.greedy import RULES, Metric, Rules, arrange, as_table
from schedules.improve import improve
from schedules.progress import Progress, bar
from schedules.schedule import Schedule
from schedules.simulate import simulate
from schedules.timeline import Timeline

MOST_STAGES = 4
"""As many stages a rank are tried where their number is free."""

WORK, MOST_WORK = 1_500_000, 5_000_000
"""Passes that a search times: so many that it times a step EACH times, within these."""

EACH = 200

FINALISTS = 6
"""So many candidates are improved, by up to TRIES changes each."""
TRIES = 3000

ENOUGH = 1e-4
"""A schedule that is no farther above the bound, as a part of it, ends the search."""

HOPELESS, FAR = 4, 1.015
"""A placement on which more orders than this were tried and none came as near to the best is left."""

FEW = (RULES[0], RULES[4], RULES[10])
"""The rules that tell promising orders from others."""

LONG = 20_000
"""A search draws a progress bar if a step on all of its placements has more passes than this."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to find a schedule for; hashable, so that what was found is kept."""

    ranks: int
    micro_batches: int
    stages_per_rank: int | None
    """None: to be chosen; the costs are then those of a rank's whole share."""
    costs: Costs
    cap: tuple[float, ...]
    """What each rank may hold."""
    in_bytes: bool = False
    metric: Metric = "makespan"
    placement: str | None = None
    """The only placement to look at: line, loop or wave."""
    polish: bool = False
    work: int | None = None
    """Passes to be timed; None: by the size of a step."""


@dataclass(frozen=True)
class Found:
    """The best schedule of a search, and what it was held against."""

    schedule: Schedule
    costs: Costs
    """Of the stages it has."""
    metric: Metric
    winner: str
    """What it was made from."""
    score: float
    """Its step time, or the longest span of a rank."""
    bound: float
    """What no order on this placement can be shorter than."""
    named: tuple[tuple[str, int, float], ...]
    """The named schedules that fit, the best first: name, stages a rank, score."""
    tried: int
    """How many orders were timed."""

    @property
    def gap(self) -> float:
        """How far the schedule is above the bound, as a part of it."""
        return self.score / self.bound - 1 if self.bound else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule under the costs it was made for."""
        return simulate(self.schedule, self.costs)

    def text(self) -> str:
        """What was found and what it was held against, in a sentence."""
        what = "step" if self.metric == "makespan" else "longest span"
        said = (
            f"{what} {self.score:.6g}, {max(self.gap, 0):.2%} above the bound; made from {self.winner}, "
            f"{_stages(self.schedule.stages_per_rank)}, the best of {self.tried} orders timed"
        )
        if self.named:
            name, stages, score = self.named[0]
            said += f"; the best schedule by name, {name} with {_stages(stages)}, takes {score:.6g}"
        return said


def _stages(number: int) -> str:
    return f"{number} stage{'s' * (number > 1)} a rank"


_one_at_a_time = threading.Lock()  # ranks that are threads ask for the same schedule at once


def search(task: Task) -> Found:
    """The best schedule for a task, kept for the next who asks. Raises CostError, ImpossibleShape or MissingLibrary."""
    with _one_at_a_time:
        return _search(task)


@lru_cache(maxsize=64)
def _search(task: Task) -> Found:
    if task.polish:
        from schedules.polish import solver

        solver()  # raises where there is none, before the work is done
    sites = []
    free = task.stages_per_rank is None and task.ranks > 1
    for stages_per_rank in range(1, MOST_STAGES + 1) if free else (task.stages_per_rank or 1,):
        costs = task.costs.divided(stages_per_rank) if free else task.costs
        for rule in rules_for(task.ranks, stages_per_rank):
            if task.placement not in (None, rule.__name__):
                continue
            sites.append(_Scored(task, Site(
                rule, stages_per_rank, task.micro_batches, costs, task.cap, task.metric, task.in_bytes
            )))  # fmt: skip
    if not sites:
        raise ImpossibleShape(
            f"there is no placement {task.placement!r} of {task.stages_per_rank or 'so many'} stages a rank on "
            f"{task.ranks} ranks; set placement to line for one stage a rank, else to loop or wave, or leave it out"
        )
    sites.sort(key=lambda one: one.bound)
    work = task.work or min(MOST_WORK, max(WORK, EACH * max(one.site.passes for one in sites)))
    with bar("looking for a schedule", show=sum(one.site.passes for one in sites) > LONG) as progress:
        return _Search(task, sites, work, progress).run()


class _Scored:
    """A site and what its schedules are held against."""

    def __init__(self, task: Task, site: Site) -> None:
        self.site = site
        self.beyond = max(site.lanes.lead)
        """What the score of an arrangement is more than the span."""
        if task.metric == "makespan":
            self.bound = bound_on(
                task.ranks, site.placement.rank_of_stage, site.placement.routes, [task.micro_batches], site.costs
            )
        else:
            load = [0.0] * task.ranks
            for stage, rank in enumerate(site.placement.rank_of_stage):
                load[rank] += task.micro_batches * sum(site.lanes.seconds[stage :: site.lanes.stages])
            self.bound = max(load)


@dataclass(slots=True)
class _Candidate:
    score: float
    on: _Scored
    name: str
    rows: Rows


@dataclass(slots=True)
class _Search:
    """The best candidates so far, and the work that is left."""

    task: Task
    sites: Sequence[_Scored]
    work: int
    progress: Progress
    left: int = 0
    tried: int = 0
    best: list[_Candidate] = field(default_factory=list)
    """The best few, no two of them on one placement with the same score."""

    def run(self) -> Found:
        self.left = self.work
        by_name = [(seed, on) for on in self.sites for seed in named(on.site)]
        timed = [(seed.name, on.site.stages_per_rank, self.time(on, seed.name, seed.rows)) for seed, on in by_name]
        if not self.done:
            self.arrange_all(by_name)
        if not self.done:
            self.improve_best()
        if not self.done and self.task.polish:
            self.polish_best()
        if not self.best:
            raise ImpossibleShape(
                f"no order keeps to a memory_cap of {min(self.task.cap)}; each rank has to hold one micro-batch, "
                f"set memory_cap to 1 or more, or memory_bytes to what one micro-batch takes on its rank"
            )
        best = self.best[0]
        tables = [as_table(best.on.site.lanes, row) for row in best.rows]
        timed.sort(key=lambda one: one[2])
        return Found(
            Schedule.from_rows("auto", tables, best.on.site.placement.rank_of_stage),
            best.on.site.costs, self.task.metric, best.name, best.score, best.on.bound, tuple(timed), self.tried,
        )  # fmt: skip

    @property
    def done(self) -> bool:
        return bool(self.best) and self.best[0].score <= self.sites[0].bound * (1 + ENOUGH)

    def spend(self, passes: int) -> None:
        self.left -= passes
        self.tried += 1
        self.progress(min(1.0, 1 - self.left / self.work))

    def keep(self, score: float, on: _Scored, name: str, rows: Rows) -> float:
        score -= on.beyond
        if all(other.on is not on or abs(other.score - score) > 1e-9 * score for other in self.best):
            self.best.append(_Candidate(score, on, name, rows))
            self.best.sort(key=lambda one: one.score)  # stable: of equal ones, a named schedule stays first
            del self.best[2 * FINALISTS :]
        return score

    def time(self, on: _Scored, name: str, rows: Rows) -> float:
        """Run rows that have their W."""
        found = times(on.site.network, rows)
        self.spend(on.site.passes)
        return math.inf if found is None else self.keep(found.score, on, name, rows)

    def arrange(self, on: _Scored, seed: Seed, rules: Rules) -> float:
        """Run an order that has its W still to come."""
        found = arrange(on.site.lanes, seed.rows, rules, on.site.cap)
        self.spend(2 * on.site.passes)
        return math.inf if found is None else self.keep(found.score, on, seed.name, found.rows)

    def arrange_all(self, by_name: Sequence[tuple[Seed, _Scored]]) -> None:
        """All orders by a few rules, then the best of them by all."""
        pool = [
            (on, Seed(seed.name, [[number for number in row if number < 2 * on.site.passes // 3] for row in seed.rows]))
            for seed, on in by_name
        ]
        turns = [list(orders(on.site)) for on in self.sites]
        for place in range(max(map(len, turns))):
            pool += [(on, seeds[place]) for on, seeds in zip(self.sites, turns, strict=True) if place < len(seeds)]
        scored: list[tuple[float, int]] = []
        seen: dict[int, list[float]] = {id(on): [] for on in self.sites}
        for rules in FEW:
            for place, (on, seed) in enumerate(pool):
                if self.left < self.work // 2 or self.done:
                    break
                own = seen[id(on)]
                if self.best and len(own) > HOPELESS and min(own) > FAR * self.best[0].score:
                    continue
                own.append(self.arrange(on, seed, rules))
                scored.append((own[-1], place))
        if not self.best:
            pool = [(on, one_at_a_time(on.site)) for on in self.sites]
            scored = [(self.arrange(on, seed, FEW[0]), place) for place, (on, seed) in enumerate(pool)]
        for place in list(dict.fromkeys(place for _, place in sorted(scored)))[: 2 * FINALISTS]:
            for rules in RULES:
                if rules not in FEW and self.left > self.work // 3 and not self.done:
                    self.arrange(*pool[place], rules)

    def improve_best(self) -> None:
        """Move passes along the critical paths of the best few."""
        chosen = self.best[:FINALISTS]
        for number, one in enumerate(chosen):
            site = one.on.site
            tries = min(TRIES, self.left // (len(chosen) - number) // (2 * site.passes))
            if tries > 0 and not self.done:
                rows = improve(site.network, one.rows, site.cap, tries, one.on.bound + one.on.beyond)
                self.left -= 2 * tries * site.passes
                self.tried += tries
                self.time(one.on, one.name, rows)

    def polish_best(self) -> None:
        """Let the solver look for something better."""
        from schedules.polish import polish

        one = self.best[0]
        found = polish(one.on.site.network, one.rows, one.on.site.cap)
        self.time(one.on, f"{one.name}, polished", found.rows)


def task_for(
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None = None,
    *,
    costs: Costs | None = None,
    memory_cap: float | Sequence[float] | None = None,
    memory_bytes: float | Sequence[float] | None = None,
    metric: Metric = "makespan",
    placement: str | None = None,
    polish: bool = False,
    work: int | None = None,
) -> Task:
    """The task that the options of ``auto`` describe. Raises CostError."""
    costs = costs or Costs()
    if stages_per_rank is None:
        lengths = {len(each) for each in (costs.F, costs.I, costs.W) if not isinstance(each, float)}
        stages_per_rank = max(1, max(lengths) // ranks) if lengths else None
    if metric not in ("makespan", "span"):
        raise CostError(f'metric is {metric!r}; set it to "makespan", or to "span" where no barrier ends a step')
    name, given = ("memory_cap", memory_cap) if memory_bytes is None else ("memory_bytes", memory_bytes)
    if given is None:
        given = float(ranks)
    cap = (float(given),) * ranks if isinstance(given, int | float) else tuple(map(float, given))
    if len(cap) != ranks:
        raise CostError(f"{name} has {len(cap)} numbers, there are {ranks} ranks; give one number or {ranks}")
    in_bytes = memory_bytes is not None
    return Task(ranks, micro_batches, stages_per_rank, costs, cap, in_bytes, metric, placement, polish, work)
