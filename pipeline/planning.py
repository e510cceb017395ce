"""Choosing the Plan: costs measured or counted where the settings ask for it, then the cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from partition import OutOfMemory, Partition, Profile, RankMemory, StateBytes, make_partition, predict_memory
from partition.recompute import choose_cuts_and_recomputed, choose_recomputed, recomputed
from partition.sizes import costs_at
from pipeline.batch import Item
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError, NotPlanned
from pipeline.layer import RandomSource
from pipeline.mesh import Mesh, Traffic, make_mesh
from pipeline.module import PipelineModule
from pipeline.plan import Plan, Shape, agree_on, plan_for
from pipeline.precision.types import types_of
from pipeline.profiler import count_parameters, profile_layers
from pipeline.timed import timed
from pipeline.watch import At
from schedules import Schedule, facts

__all__ = [
    "changed",
    "choose_plan",
    "item_of_first",
    "mesh_for",
    "next_plan",
    "plan_by",
    "planned_costs",
    "predicted_memory",
    "profile_on",
    "require_memory",
    "state_bytes",
]


def mesh_for(config: PipelineConfig, profile: Profile | None) -> Mesh:
    """The ranks arranged as the settings say.  Collective over all of them."""
    return make_mesh(
        config.data_parallel,
        inside=config.mesh_inside,
        traffic=None if profile is None else _traffic(config, profile),
        ranks_per_node=config.ranks_per_node,
        device=config.device,
        link=config.link,
        timeout=config.timeout,
    )


def _traffic(config: PipelineConfig, profile: Profile) -> Callable[[int], Traffic]:
    """What a rank sends in a step, by the number of ranks in a pipeline."""
    copies, stages = config.data_parallel, config.stages_per_rank or 1
    boundary = fmean(layer.output_bytes for layer in profile.layers)
    parameters = sum(layer.parameter_bytes for layer in profile.layers)

    def of(pipe: int) -> Traffic:
        # A boundary is sent once forward, and as much backward; gradients are reduced and parameters gathered, or sums
        # are, which is the same.
        return Traffic(
            2 * config.micro_batches * stages * boundary, 2 * parameters / pipe * (copies - 1) / copies
        )

    return of


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
        profile = profile_on(item_of_first(item, mesh, schedule), config, module, mesh, random)
    elif config.partition == "parameters":
        counts = count_parameters(module, random)
    # Timing a schedule may take a while, so one rank does it for all.
    first_only = partial(_on_first, mesh)
    plan = plan_by(config, module, mesh, schedule, profile=profile, counts=counts, search=first_only)
    agree_on({"plan": plan.digest()}, mesh.world)
    return plan, profile


def item_of_first(item: Item | None, mesh: Mesh, schedule: Schedule) -> Item | None:
    """The micro-batch on the rank of the first stage, on every rank; None where that has none.  Collective."""
    first = mesh.world_rank(0, schedule.rank_of_stage[schedule.first_stage(0)])
    found: Item | None = mesh.world.broadcast_object(item, first)
    return found


def profile_on(
    item: Item | None, config: PipelineConfig, module: PipelineModule, mesh: Mesh, random: RandomSource
) -> Profile:
    """What the layers cost on this micro-batch.  Collective."""
    if item is None:
        raise NotPlanned("there is no micro-batch to time the layers on; call train_batch, eval_batch or forward first")
    mesh.board.at(At.PROFILE)
    return profile_layers(
        module,
        item,
        random,
        mesh,
        runs=config.profile_runs,
        recompute=plan_for(config, module, mesh, cuts=()).recompute,
        threads=config.threads,
        compiler=config.compile,
        types=types_of(config.precision, module),
    )


def plan_by(
    config: PipelineConfig,
    module: PipelineModule,
    shape: Shape,
    schedule: Schedule,
    *,
    profile: Profile | None,
    counts: Sequence[int] | None = None,
    search: Callable[[Callable[[], Plan]], Plan] = lambda make: make(),
) -> Plan:
    """The Plan for layers of these costs, or of ``counts`` parameters; ``search`` runs what may take a while."""
    types = [module.type_of(index) for index in range(len(module))]
    profile = None if profile is None else _at_size(config, profile)
    plan = plan_for(config, module, shape, cuts=())
    memory = state_bytes(config, plan)
    costs, limit = profile, config.memory_limit
    cap = None if profile is None or config.recompute == "auto" else limit

    def cut(one: Schedule, costs: Profile | None = profile) -> Partition:
        return make_partition(
            config.partition, one, profile=costs, types=types, parameters=counts, memory_cap=cap, state=memory
        )

    if limit is None or profile is None or config.recompute != "auto":
        plan = replace(plan, cuts=cut(schedule).cuts)
    else:
        partition, layers = choose_cuts_and_recomputed(profile, schedule, partial(cut, schedule), limit, memory)
        plan, costs = replace(plan, cuts=partition.cuts, recompute=layers), recomputed(profile, layers)
    if costs is not None and "costs" in facts(config.schedule).options:
        free = config.stages_per_rank is None and not isinstance(config.partition, tuple)
        plan = search(partial(timed, plan, schedule, costs, partial(cut, costs=costs), free=free))
        if limit is not None and profile is not None and config.recompute == "auto":  # it may have other stages
            layers = choose_recomputed(profile, plan.partition, plan.build_schedule(), limit, memory)
            plan = replace(plan, recompute=layers)
    return plan


def _at_size(config: PipelineConfig, profile: Profile) -> Profile:
    """The costs for micro-batches as large as they are now."""
    if config.rows is None or profile.rows is None or profile.rows == config.rows // config.micro_batches:
        return profile
    return costs_at(config.rows // config.micro_batches, {profile.rows: profile})


def _on_first(mesh: Mesh, make: Callable[[], Plan]) -> Plan:
    """What the first rank makes.  Collective over all ranks."""
    plan: Plan = mesh.world.broadcast_object(make() if mesh.world.rank == 0 else None, 0)
    return plan


def state_bytes(config: PipelineConfig, plan: Plan) -> StateBytes:
    """What the plan keeps of each parameter, with an optimizer that keeps two moments as Adam does."""
    master = 4.0 if config.precision else 0.0
    return StateBytes(master=master).in_parts(plan.zero, plan.data, whole_layers=config.zero_whole_layers)


def require_memory(config: PipelineConfig, plan: Plan, profile: Profile) -> None:
    """Raise ``OutOfMemory`` where a rank would need more than ``memory_limit``."""
    limit = config.memory_limit
    needs = [] if limit is None else [rank.total for rank in predicted_memory(config, plan, profile)]
    if limit is not None and max(needs) > limit:
        raise OutOfMemory(
            f"rank {needs.index(max(needs))} would need {max(needs):.0f} bytes, and memory_limit is {limit:.0f}; raise "
            "it, use more ranks, a higher zero or smaller micro-batches"
        )


def predicted_memory(config: PipelineConfig, plan: Plan, profile: Profile) -> tuple[RankMemory, ...]:
    """What the profile says of each rank of the pipeline in a training step."""
    costs = planned_costs(config, plan, profile)
    return predict_memory(costs, plan.partition, plan.build_schedule(), state_bytes(config, plan))


FIXED = ("seed", "device", "threads", "link", "timeout", "compile", "profile", "keep_freed_memory")
"""Settings that hold for a whole run."""


def changed(config: PipelineConfig, changes: Mapping[str, Any]) -> PipelineConfig:
    """The settings with some of them changed while training runs.

    Raises ``ConfigError`` for one that cannot be, or that is wrong.
    """
    fixed = [name for name in FIXED if name in changes]
    if fixed:
        raise ConfigError(
            f"{fixed[0]} cannot change while training runs; save a checkpoint, and go on from it with a new engine"
        )
    return PipelineConfig(**{**config.model_dump(), **changes})


def next_plan(
    config: PipelineConfig, module: PipelineModule, mesh: Mesh, random: RandomSource, profile: Profile | None
) -> Plan:
    """The Plan for settings that have changed.  Collective."""
    if config.partition == "profile" and profile is None:
        raise ConfigError(
            'there is no profile to cut by, since the layers were not timed at the start; set partition to "uniform", '
            '"parameters" or cut points, or give a profile'
        )
    begun = plan_for(config, module, mesh, cuts=(0, len(module))).build_schedule()
    if begun.forward_only:
        raise ConfigError(f"schedule {config.schedule!r} has no backward; to train, set schedule to 1f1b, say")
    return choose_plan(config, module, mesh, begun, random, item=None, profile=profile)[0]


def planned_costs(config: PipelineConfig, plan: Plan, profile: Profile) -> Profile:
    """What the plan's layers cost: those that it chose to recompute were measured without."""
    profile = _at_size(config, profile)
    return recomputed(profile, plan.recompute) if config.recompute == "auto" else profile
