"""What a step is predicted to take, with all that replicas do together."""

from __future__ import annotations

from dataclasses import replace

from partition import Profile, stage_costs
from pipeline.comm.ways import Ways
from pipeline.plan import Plan
from schedules import Schedule, Timeline, lower, simulate
from schedules.sharing import Sharing

__all__ = ["predict_step"]

_GRADIENT = 4  # bytes of an element, at least


def predict_step(profile: Profile, plan: Plan, schedule: Schedule, sharing: Sharing, ways: Ways) -> Timeline:
    """The simulated step of a program: passes by the profile, exchanges by what ``ways`` were measured to take."""
    costs = stage_costs(profile, plan.partition, schedule)
    groups = [
        [profile.layers[layer] for layer in plan.partition.layers_of(group)] for group in schedule.layer_group_of_stage
    ]
    reduce = [sum(ways.seconds("gradients", _GRADIENT * cost.parameters) for cost in group) for group in groups]
    unshard = [sum(ways.seconds("parameters", cost.parameter_bytes) for cost in group) for group in groups]
    return simulate(lower(schedule, sharing), replace(costs, reduce=reduce, unshard=unshard))
