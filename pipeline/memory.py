"""What each rank holds between two steps, measured from the tensors that live, and beside it what was predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from partition import Profile, RankMemory, StateBytes, predict_memory
from pipeline.build import BuiltLayers
from pipeline.links.protocol import Group
from pipeline.plan import Plan
from pipeline.update import Updater

__all__ = ["Held", "MemoryReport", "held_by", "memory_report", "predicted_memory"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Held(NamedTuple):
    """Bytes of one rank between two steps, a storage that serves several tensors counted once; gradients with what
    their compression has left out; the optimizer's are its state, and weights in fp32 beside those of 16 bits."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(self)


class MemoryReport(NamedTuple):
    """One entry a pipeline rank: what it held when asked, and where there is a profile what was predicted of it, with
    the most activations and messages of a step."""

    measured: tuple[Held, ...]
    predicted: tuple[RankMemory, ...] | None

    def __str__(self) -> str:
        """A table, a rank a line; the fullest one is marked."""
        fullest = max(range(len(self.measured)), key=lambda rank: self.measured[rank].total)
        lines = [f"{'rank':6}" + "".join(f"{name:>22}" for name in (*Held._fields, "activations", "total"))]
        for rank, held in enumerate(self.measured):
            cells = [_size(value) for value in held]
            if self.predicted is not None:
                said = self.predicted[rank]
                cells = [f"{cell} ({_size(value)})" for cell, value in zip(cells, said, strict=False)]
                cells += [f"({_size(said.activations + said.messages)})", f"{_size(held.total)} ({_size(said.total)})"]
            else:
                cells += ["", _size(held.total)]
            mark = " *" if rank == fullest else ""
            lines.append(f"{rank:<6}" + "".join(f"{cell:>22}" for cell in cells) + mark)
        return "\n".join([*lines, "* the fullest rank" + ("; predicted in brackets" if self.predicted else "")])


def memory_report(
    built: BuiltLayers, update: Updater | None, plan: Plan, costs: Profile | None, pipeline: Group
) -> MemoryReport:
    """What every rank of the pipeline holds now, and by the profile should.  Collective over the pipeline's ranks."""
    mine = held_by(built, None if update is None else update.optimizer)
    return MemoryReport(
        tuple(pipeline.all_gather_object(mine)), None if costs is None else predicted_memory(plan, costs)
    )


def held_by(built: BuiltLayers, optimizer: Optimizer | None) -> Held:
    """What this rank holds now."""
    shards = [shard for shards in built.shards.values() for shard in shards]
    modules = [layer.module for layer in built.layers.values() if layer.module is not None]
    rests = [s.compressor.rest for s in shards if s.compressor is not None and s.compressor.rest is not None]
    masters = [shard.trained for shard in shards if shard.trained is not shard.parameters]
    state = [] if optimizer is None else [v for values in optimizer.state.values() for v in values.values()]
    return Held(
        _bytes(tensor for shard in shards for tensor in (shard.parameters, shard.vector.parameters)),
        _bytes([*(tensor for shard in shards for tensor in (shard.gradients, shard.vector.gradients)), *rests]),
        _bytes([*(value for value in state if isinstance(value, Tensor)), *masters]),
        _bytes(buffer for module in modules for buffer in module.buffers()),
    )


def _bytes(tensors: Iterable[Tensor]) -> float:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return float(sum({storage._cdata: storage.nbytes() for storage in storages}.values()))


def predicted_memory(plan: Plan, profile: Profile) -> tuple[RankMemory, ...]:
    """What the profile says of each rank in a training step, with an optimizer that keeps two moments as Adam does."""
    return predict_memory(profile, plan.partition, plan.build_schedule(), StateBytes().in_parts(plan.zero, plan.data))


def _size(value: float) -> str:
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
