"""Choosing the Plan: costs measured or counted where the settings ask for it, then the cuts."""

from __future__ import annotations

from partition import Partition, Profile, make_partition
from pipeline.batch import Item
from pipeline.config import PipelineConfig
from pipeline.layer import RandomSource
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.plan import Plan, agree_on, plan_for
from pipeline.precision.types import types_of
from pipeline.profiler import count_parameters, profile_layers
from pipeline.timed import timed
from pipeline.watch import At
from schedules import Schedule, facts

__all__ = ["choose_plan"]


def choose_plan(
    config: PipelineConfig,
    module: PipelineModule,
    mesh: Mesh,
    schedule: Schedule,
    random: RandomSource,
    *,
    item: Item | None,
    profile: Profile | None,
) -> tuple[Plan, Profile | None]:
    """The Plan, the same on every rank, and the profile it was made from.  Collective.

    ``item`` is a micro-batch on the rank of the first stage, which the layers are timed on where the cuts follow
    measured costs and no ``profile`` is given.
    """
    counts = None
    if config.partition == "profile" and profile is None:
        mesh.board.at(At.PROFILE)
        first = mesh.world_rank(0, schedule.rank_of_stage[schedule.first_stage(0)])
        profile = profile_layers(
            module,
            mesh.world.broadcast_object(item, first),
            random,
            mesh,
            runs=config.profile_runs,
            recompute=plan_for(config, module, mesh, cuts=()).recompute,
            threads=config.threads,
            compiler=config.compile,
            types=types_of(config.precision, module),
        )
    elif config.partition == "parameters":
        counts = count_parameters(module, random)
    types = [module.type_of(index) for index in range(len(module))]

    def cut(one: Schedule) -> Partition:
        return make_partition(config.partition, one, profile=profile, types=types, parameters=counts)

    plan = plan_for(config, module, mesh, cut(schedule).cuts)
    if profile is not None and "costs" in facts(config.schedule).options:
        free = config.stages_per_rank is None and not isinstance(config.partition, tuple)
        # Timing may take a while, so one rank does it for all.
        chosen = timed(plan, schedule, profile, cut, free=free) if mesh.world.rank == 0 else None
        plan = mesh.world.broadcast_object(chosen, 0)
    agree_on({"plan": plan.digest()}, mesh.world)
    return plan, profile
