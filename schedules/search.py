"""The automatic search: candidates are arranged for the costs and the memory, and the best of them improved.

    named schedules that fit ──────────────────────┐
                                                   ├──► the best few ──► improved along the critical path ──► the best
    orders × warm-up ──► arranged by all RULES ────┘

How much is tried is counted in passes timed and not in seconds, so that every rank of a job finds the same schedule. As
soon as one meets the bound, the search is over. Since named schedules are among the candidates, what is found is never
worse than the best of those that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from schedules.bound import bound_on
from schedules.candidates import Orders, Seed, Site, named, orders, sites
from schedules.costs import Costs
from schedules.critical import times
from schedules.errors import CostError, ImpossibleShape
from schedules.greedy import EPSILON, RULES, Metric, arrange, as_table
from schedules.improve import improve
from schedules.schedule import Schedule
from schedules.simulate import simulate
from schedules.timeline import Timeline

MOST_STAGES = 4
"""As many stages a rank are tried where their number is free."""

WORK = 4_000_000
"""Passes that a search times, unless told otherwise."""

FINALISTS = 6
"""So many of the candidates are improved."""

Progress = Callable[[float], None]
"""Told which part of the work is done."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to find a schedule for; hashable, so that what was found is kept."""

    ranks: int
    micro_batches: int
    stages_per_rank: int | None
    """None: chosen, and the costs are those of a rank's whole share."""
    costs: Costs
    cap: tuple[float, ...]
    """What each rank may hold."""
    in_bytes: bool = False
    metric: Metric = "makespan"
    work: int = WORK


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
    """How many arrangements were timed."""

    @property
    def gap(self) -> float:
        """How far the schedule is above the bound, as a part of it."""
        return self.score / self.bound - 1 if self.bound else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule under the costs it was made for."""
        return simulate(self.schedule, self.costs)

    def text(self) -> str:
        """What was found, in a sentence or two."""
        what = "step" if self.metric == "makespan" else "longest span"
        said = (
            f"{self.winner}, {self.schedule.stages_per_rank} stages a rank: {what} {self.score:.6g}, "
            f"{self.gap:.2%} above the bound {self.bound:.6g}, best of {self.tried}"
        )
        if self.named:
            name, stages, score = self.named[0]
            said += f"; the best schedule by name, {name} with {stages} stages a rank, takes {score:.6g}"
        return said


@lru_cache(maxsize=64)
def search(task: Task, progress: Progress | None = None) -> Found:
    """The best schedule for a task. Raises CostError or ImpossibleShape."""
    return _Search(task, progress).run()


@dataclass(slots=True)
class _Candidate:
    score: float
    site: Site
    seed: Seed
    rows: Orders


class _Search:
    """The candidates so far, and the work that is left."""

    def __init__(self, task: Task, progress: Progress | None) -> None:
        choices = tuple(range(1, MOST_STAGES + 1)) if task.stages_per_rank is None else (task.stages_per_rank,)
        if task.ranks == 1 and task.stages_per_rank is None:
            choices = (1,)
        self.task, self.progress = task, progress
        self.sites = tuple(
            sites(task.ranks, task.micro_batches, choices, task.costs, task.cap, task.metric, task.in_bytes)
        )
        self.offset = {id(site): _offset(site, task.metric) for site in self.sites}
        self.bounds = {id(site): _bound(site, task) for site in self.sites}
        self.best_bound = min(self.bounds.values())
        self.left = task.work
        self.found: list[_Candidate] = []
        self.tried = 0

    def run(self) -> Found:
        for site in self.sites:
            for seed in named(site):
                self.time(site, seed, seed.rows)
        by_name = sorted(((one.seed.name, one.site.stages_per_rank, one.score) for one in self.found), key=lambda o: o[2])
        if not self.done:
            self.arrange_all()
        if not self.done:
            self.improve_best()
        if not self.found:
            raise ImpossibleShape(
                f"no schedule keeps to memory_cap {self.task.cap}; set it to one micro-batch or more, "
                f"or stages_per_rank to a larger number"
            )
        best = self.best
        schedule = Schedule.from_rows(
            "auto", [as_table(best.site.lanes, row) for row in best.rows], best.site.placement.rank_of_stage
        )  # fmt: skip
        return Found(
            schedule, best.site.costs, self.task.metric, best.seed.name, best.score, self.bounds[id(best.site)],
            tuple(by_name), self.tried,
        )  # fmt: skip

    @property
    def best(self) -> _Candidate:
        return min(self.found, key=lambda one: one.score)

    @property
    def done(self) -> bool:
        return bool(self.found) and self.best.score <= self.best_bound + EPSILON

    def keep(self, score: float, site: Site, seed: Seed, rows: Orders) -> None:
        self.found.append(_Candidate(score - self.offset[id(site)], site, seed, rows))

    def spend(self, passes: int) -> None:
        self.left -= passes
        self.tried += 1
        if self.progress is not None:
            self.progress(min(1.0, 1 - self.left / self.task.work))

    def time(self, site: Site, seed: Seed, rows: Orders) -> None:
        found = times(site.network, rows)
        self.spend(site.passes)
        if found is not None:
            self.keep(found.score, site, seed, rows)

    def arrange_all(self) -> None:
        """All orders by a few rules, then the best of them by all."""
        pool = [(site, seed) for site in self.sites for seed in orders(site)]
        pool += [
            (one.site, Seed(one.seed.name, [[n for n in row if n < 2 * one.site.passes // 3] for row in one.rows]))
            for one in self.found
        ]
        scored = []
        few = (RULES[0], RULES[4], RULES[10])
        for rules in few:
            for place, (site, seed) in enumerate(pool):
                if self.left < self.task.work // 2:
                    break
                score = self.arrange(site, seed, rules)
                scored.append((score, place))
                if self.done:
                    return
        best_places = list(dict.fromkeys(place for _, place in sorted(scored)))[: 2 * FINALISTS]
        for place in best_places:
            for rules in RULES:
                if rules not in few and self.left > self.task.work // 3:
                    self.arrange(*pool[place], rules)
                    if self.done:
                        return

    def arrange(self, site: Site, seed: Seed, rules: object) -> float:
        found = arrange(site.lanes, seed.rows, rules, site.cap)  # type: ignore[arg-type]
        self.spend(2 * site.passes)
        if found is None:
            return math.inf
        self.keep(found.score, site, seed, found.rows)
        return self.found[-1].score

    def improve_best(self) -> None:
        """Move passes along the critical paths of the best few."""
        seen, chosen = set(), []
        for one in sorted(self.found, key=lambda one: one.score):
            key = (id(one.site), round(one.score, 9))
            if key not in seen:
                seen.add(key)
                chosen.append(one)
        for turn, one in enumerate(chosen[:FINALISTS]):
            share = self.left // (min(len(chosen), FINALISTS) - turn)
            tries = min(3000, share // one.site.passes)
            rows = improve(one.site.network, one.rows, one.site.cap, tries=tries)
            self.left -= tries * one.site.passes
            self.time(one.site, one.seed, rows)
            if self.done:
                return


def _offset(site: Site, metric: Metric) -> float:
    """What a score is too large by: the longest lead."""
    return max(site.lanes.lead)


def _bound(site: Site, task: Task) -> float:
    if task.metric == "span":
        stages, m = site.lanes.stages, task.micro_batches
        load = [0.0] * task.ranks
        for stage, rank in enumerate(site.placement.rank_of_stage):
            load[rank] += m * sum(site.lanes.seconds[stage::stages])
        return max(load)
    return bound_on(task.ranks, site.placement.rank_of_stage, site.placement.routes, [task.micro_batches], site.costs)


def task_for(
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None,
    costs: Costs | None,
    memory_cap: float | Sequence[float] | None,
    memory_bytes: float | Sequence[float] | None,
    metric: Metric,
    work: int,
) -> Task:
    """The task that options describe. Raises CostError."""
    costs = costs or Costs()
    if stages_per_rank is None:
        counts = {len(each) for each in (costs.F, costs.I, costs.W) if not isinstance(each, float)}
        if counts:
            stages_per_rank = max(1, max(counts) // ranks)
    given = memory_bytes if memory_bytes is not None else memory_cap if memory_cap is not None else float(ranks)
    cap = (float(given),) * ranks if isinstance(given, int | float) else tuple(map(float, given))
    if len(cap) != ranks:
        raise CostError(f"memory_cap has {len(cap)} numbers, there are {ranks} ranks; give one number or {ranks}")
    return Task(ranks, micro_batches, stages_per_rank, costs, cap, memory_bytes is not None, metric, work)
