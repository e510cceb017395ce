"""Schedules that are timed for costs get the measured ones, and `auto` is asked for every number of stages a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from partition import Partition, Profile, stage_costs
from pipeline.plan import Plan
from schedules import Schedule, build, facts, simulate
from schedules.candidates import rules_for
from schedules.search import MOST_STAGES

__all__ = ["timed"]

Cut = Callable[[Schedule], Partition]


def timed(plan: Plan, schedule: Schedule, profile: Profile, cut: Cut, *, free: bool) -> Plan:
    """The plan of a schedule that takes costs, with those of its stages.

    ``schedule`` is the one the plan was begun with, ``cut`` makes the cuts for another. Where ``free``, a schedule that
    chooses is built for 1 to 4 stages a rank, as far as there are layers and first and last stage stay on their ranks,
    since who reads the data is settled by then; the shortest step wins.
    """
    known = facts(plan.schedule)
    begun = [schedule]
    if known.chooses:
        begun = list(_placements(schedule, len(profile.layers), free=free))
    found: list[tuple[float, int, Plan]] = []
    for one in begun:
        partition = Partition(plan.cuts) if one is schedule else cut(one)
        costs = stage_costs(profile, partition, one)
        own = replace(
            plan,
            cuts=partition.cuts,
            stages_per_rank=one.stages_per_rank,
            costs=tuple(tuple(costs.per_stage(name, one.num_stages).tolist()) for name in ("F", "I", "W")),
            hop=costs.hop,
            speeds=profile.speeds_for(one.ranks),
        )
        if known.chooses:
            placed = ("placement", one.name)
            own = replace(own, schedule_options=tuple(sorted({*own.schedule_options, placed})))
        if not known.chooses:
            return own
        found.append((simulate(own.build_schedule(), costs).step_time, len(found), own))
    return min(found)[2]


def _placements(schedule: Schedule, layers: int, *, free: bool) -> Iterator[Schedule]:
    """A schedule on each placement that may be chosen, by whose name it goes: what the layers are cut for."""
    ends = _ends(schedule)
    choices = range(1, MOST_STAGES + 1) if free else (schedule.stages_per_rank,)
    for stages_per_rank in choices:
        if free and stages_per_rank * schedule.ranks > layers:
            break
        for rule in rules_for(schedule.ranks, stages_per_rank):
            name = "interleaved-zb" if rule.__name__ != "wave" else "zb-v" if stages_per_rank == 2 else "hanayo"
            made = build(
                name, ranks=schedule.ranks, micro_batches=schedule.micro_batches, stages_per_rank=stages_per_rank
            )
            if _ends(made) == ends:
                yield replace(made, name=rule.__name__)


def _ends(schedule: Schedule) -> tuple[int, int]:
    """The ranks of the first and the last stage."""
    return schedule.rank_of_stage[schedule.first_stage(0)], schedule.rank_of_stage[schedule.last_stage(0)]
