"""The Plan: everything that is chosen before a step runs, compared between ranks by its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from partition import Partition
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError, PlanMismatch
from pipeline.links.protocol import Group
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from schedules import Costs, Schedule, build, facts

__all__ = ["Plan", "Shape", "agree_on", "environment", "plan_for"]


class Shape(Protocol):
    """How many pipelines there are, and ranks in each: those of a Mesh, or ones that are only thought of."""

    @property
    def data(self) -> int: ...

    @property
    def pipe(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Mesh degrees, cuts, schedule and micro-batches, and the layers that recompute.

    ``cuts`` has one number more than there are layer groups: group g holds layers ``cuts[g]`` to ``cuts[g + 1]``.
    """

    data: int
    pipe: int
    schedule: str
    schedule_options: tuple[tuple[str, Any], ...]
    stages_per_rank: int | None
    micro_batches: int
    cuts: tuple[int, ...]
    recompute: tuple[int, ...]
    zero: int = 0
    """What data-parallel ranks hold in parts: the stage of ZeRO."""
    costs: tuple[tuple[float, ...], ...] | None = None
    """Seconds of F, of I and of W on each stage at speed 1, for a schedule that is timed for them; None: it is not."""
    hop: float = 0.0
    """Seconds of a message from rank to rank, for such a schedule."""
    speeds: tuple[float, ...] = ()
    """How fast each rank of a pipeline is, for such a schedule; empty: all alike."""

    def build_schedule(self, micro_batches: int | None = None) -> Schedule:
        """The schedule for a step of this many micro-batches, the Plan's number unless given."""
        options = dict(self.schedule_options)
        if self.costs is not None:
            forward, input_grad, weight_grad = self.costs
            options["costs"] = Costs(F=forward, I=input_grad, W=weight_grad, hop=self.hop, speed=self.speeds or 1.0)
        return build(
            self.schedule,
            ranks=self.pipe,
            micro_batches=micro_batches or self.micro_batches,
            stages_per_rank=self.stages_per_rank,
            **options,
        )

    @property
    def partition(self) -> Partition:
        return Partition(self.cuts)

    def digest(self) -> str:
        """16 hexadecimal digits, equal for equal plans."""
        return _digest(asdict(self))


def plan_for(config: PipelineConfig, module: PipelineModule, shape: Shape, cuts: tuple[int, ...]) -> Plan:
    """The Plan that the settings ask for, with these cuts, on pipelines of this ``shape``.

    A schedule that chooses how many stages a rank holds begins with one; where layers are timed it may choose anew.
    """
    stages_per_rank = config.stages_per_rank
    if stages_per_rank is None and facts(config.schedule).chooses:
        stages_per_rank = 1
    return Plan(
        data=shape.data,
        pipe=shape.pipe,
        schedule=config.schedule,
        schedule_options=tuple(sorted(config.schedule_options.items())),
        stages_per_rank=stages_per_rank,
        micro_batches=config.micro_batches,
        cuts=cuts,
        recompute=_recomputed(config, len(module)),
        zero=config.zero if shape.data > 1 else 0,
    )


def _recomputed(config: PipelineConfig, layers: int) -> tuple[int, ...]:
    chosen = config.recompute
    if chosen in ("none", "auto"):  # which those are is chosen when the layers have been timed
        return ()
    if isinstance(chosen, str):
        step = int(chosen.partition(":")[2] or 1)
        return tuple(range(0, layers, step))
    beyond = [index for index in chosen if not 0 <= index < layers]
    if beyond:
        raise ConfigError(f"recompute names layer {beyond[0]}, but the model has layers 0 to {layers - 1}")
    return tuple(chosen)


def environment(config: PipelineConfig, module: PipelineModule, mesh: Mesh) -> dict[str, str]:
    """What must be equal on all ranks besides the Plan, and what decides the bits of a result, by name."""
    return {
        **module.facts(),
        "world size": str(mesh.size),
        **{f"setting {name}": repr(value) for name, value in config.model_dump(mode="json").items()},
        "torch": torch.__version__,
        "default dtype": str(torch.get_default_dtype()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }


def agree_on(facts: Mapping[str, str], group: Group) -> None:
    """Compare ``facts`` between ranks before anything is built.  Collective.

    Hashes travel first; the facts themselves only where these differ.  Raises ``PlanMismatch`` on every rank, naming
    what differs and where.
    """
    if len(set(group.all_gather_object(_digest(dict(facts))))) == 1:
        return
    gathered = group.all_gather_object(dict(facts))
    first = gathered[0]
    for rank, other in enumerate(gathered):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            shown = "; ".join(
                f"{name}: {first.get(name, 'none')} on rank 0, {other.get(name, 'none')} on rank {rank}"
                for name in names[:3]
            )
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise PlanMismatch(
                f"ranks do not run the same thing: {shown}{more}; start every rank with the same code and settings"
            )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
