"""The size of micro-batches that makes the shortest step, chosen before the first one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from partition import OutOfMemory, Profile, predict_timeline
from partition.sizes import Sized, best, costs_at, tried
from pipeline.batch import Item, rows_of
from pipeline.config import PipelineConfig
from pipeline.errors import NotPlanned
from pipeline.layer import RandomSource
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.plan import Plan, Shape, plan_for
from pipeline.planning import item_of_first, plan_by, planned_costs, profile_on, require_memory
from schedules import Schedule
from schedules.errors import ScheduleError

__all__ = ["Chosen", "choose_size", "with_number"]


class Chosen(NamedTuple):
    """The settings with the number of micro-batches that was chosen, what layers cost at that size, and why."""

    config: PipelineConfig
    profile: Profile
    reason: str


def choose_size(
    config: PipelineConfig,
    module: PipelineModule,
    mesh: Mesh,
    schedule: Schedule,
    random: RandomSource,
    item: Item | None,
) -> Chosen:
    """Time the layers on a micro-batch and on half of one, and choose.  Collective.

    ``item`` is a micro-batch on the rank of the first stage.  Raises ``OutOfMemory`` on every rank where no size keeps
    within ``memory_limit``.
    """
    whole = item_of_first(item, mesh, schedule)
    if whole is None:
        raise NotPlanned("the size of micro-batches is chosen when the first one has been seen; call train_batch first")
    rows = rows_of(whole) or 1
    other = _resized(whole, rows // 2 if rows > 1 else 2)
    profiles = [profile_on(one, config, module, mesh, random) for one in (whole, other)]
    known = {profile.rows or 1: profile for profile in profiles}
    found = mesh.world.broadcast_object(_tried(config, module, mesh, known) if mesh.rank == 0 else None, 0)
    chosen = best(found)
    if chosen is None:
        raise OutOfMemory(
            f"no size of micro-batch keeps within memory_limit = {config.memory_limit} bytes; raise it, use more ranks "
            'or a higher zero, or set recompute to "auto"'
        )
    total = config.rows or rows
    profile = costs_at(total // chosen.number, known)
    return Chosen(with_number(config, chosen.number), profile, _reason(found, chosen, total))


def with_number(config: PipelineConfig, number: int) -> PipelineConfig:
    """The settings with another number of micro-batches of the same rows."""
    return config.model_copy(update={"micro_batches": number})


def _tried(
    config: PipelineConfig, module: PipelineModule, shape: Shape, known: dict[int, Profile]
) -> list[Sized]:
    def predict(number: int, profile: Profile) -> float | None:
        settings = with_number(config, number)
        try:
            begun = plan_for(settings, module, shape, cuts=(0, len(module))).build_schedule()
            counts = [layer.parameters for layer in profile.layers]
            plan = plan_by(settings, module, shape, begun, profile=profile, counts=counts)
            return predicted_seconds(settings, plan, profile)
        except (ScheduleError, OutOfMemory):
            return None

    return tried(config.rows or 1, known, predict)


def predicted_seconds(config: PipelineConfig, plan: Plan, profile: Profile) -> float:
    """Seconds of a step by simulation.  Raises ``OutOfMemory`` where a rank would need more than ``memory_limit``."""
    require_memory(config, plan, profile)
    return predict_timeline(planned_costs(config, plan, profile), plan.partition, plan.build_schedule()).step_time


def _reason(found: list[Sized], chosen: Sized, rows: int) -> str:
    others = [one for one in found if one.seconds is not None and one != chosen]
    second = best(others)
    size = rows // chosen.number
    text = f"micro-batches: {chosen.number} of {size} rows, by which a step is predicted to take {chosen.seconds:.4g} s"
    if second is not None:
        text += f"; {second.number} of {rows // second.number} would take {second.seconds:.4g} s"
    refused = [one.number for one in found if one.seconds is None]
    if refused:
        text += f"; not possible, or beyond memory_limit: {', '.join(map(str, refused))}"
    return text


def _resized(item: Item, rows: int) -> Item:
    """The first rows of it, repeated where there are too few."""

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return leaf[:rows] if len(leaf) >= rows else leaf.repeat(rows // len(leaf), *[1] * (leaf.dim() - 1))

    return Item(*tree_map(resized, tuple(item)))
