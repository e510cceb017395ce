"""What each rank holds between two steps, measured from the tensors that live, and beside it what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from partition import RankMemory
from pipeline.build import BuiltLayers
from pipeline.growth import ELSEWHERE, kept_by_layer
from pipeline.links.protocol import Group

__all__ = ["Held", "MemoryReport", "grown_since", "held_by", "kept_now", "size_text"]

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
    the most activations and messages of a step, and what ZeRO has whole meanwhile.

    ``grown``: by how many bytes each layer keeps more than at the end of step ``since``, beside parameters and buffers.
    """

    measured: tuple[Held, ...]
    predicted: tuple[RankMemory, ...] | None
    since: int | None = None
    grown: Mapping[str, float] = {}

    def __str__(self) -> str:
        """A table, a rank a line, of which the fullest is marked; then who keeps more than before."""
        fullest = max(range(len(self.measured)), key=lambda rank: self.measured[rank].total)
        lines = [f"{'rank':6}" + "".join(f"{name:>22}" for name in (*Held._fields, "activations", "total"))]
        for rank, held in enumerate(self.measured):
            cells = [size_text(value) for value in held]
            if self.predicted is not None:
                said = self.predicted[rank]
                cells = [f"{cell} ({size_text(value)})" for cell, value in zip(cells, said, strict=False)]
                cells.append(f"({size_text(said.activations + said.messages + said.whole)})")
                cells.append(f"{size_text(held.total)} ({size_text(said.total)})")
            else:
                cells += ["", size_text(held.total)]
            mark = " *" if rank == fullest else ""
            lines.append(f"{rank:<6}" + "".join(f"{cell:>22}" for cell in cells) + mark)
        lines.append("* the fullest rank" + ("; predicted in brackets" if self.predicted else ""))
        if self.since is not None:
            grown = [f"{name} keeps {size_text(more)} more" for name, more in self.grown.items()]
            lines.append(f"since step {self.since}: {'; '.join(grown) or 'nothing has grown'}")
        return "\n".join(lines)


def held_by(built: BuiltLayers, optimizer: Optimizer | None) -> Held:
    """What this rank holds now."""
    return Held(*(float(sum(sizes.values())) for sizes in _storages(built, optimizer)))


def kept_now(built: BuiltLayers, optimizer: Optimizer | None, *, alone: bool) -> dict[str, float]:
    """Bytes that each layer of this rank keeps beside those, by name; and if it is ``alone`` in its process, what else
    lives there."""
    known = {storage for sizes in _storages(built, optimizer) for storage in sizes}
    return kept_by_layer(built.layers.values(), known, elsewhere=alone)


def grown_since(before: Mapping[str, float], now: Mapping[str, float], pipeline: Group) -> dict[str, float]:
    """What has become more on any rank, the layers first, and the most.  Collective over the pipeline's ranks."""
    more = {name: size - before.get(name, 0.0) for name, size in now.items()}
    found: dict[str, float] = {}
    for others in pipeline.all_gather_object(more):
        for name, size in others.items():
            found[name] = max(size, found.get(name, 0.0))
    grown = [(name, size) for name, size in found.items() if size > 0]
    return dict(sorted(grown, key=lambda item: (item[0] == ELSEWHERE, -item[1])))


def _storages(built: BuiltLayers, optimizer: Optimizer | None) -> tuple[dict[int, int], ...]:
    """The bytes of each storage, for the fields of ``Held``."""
    shards = [shard for shards in built.shards.values() for shard in shards]
    modules = [layer.module for layer in built.layers.values() if layer.module is not None]
    rests = [s.compressor.rest for s in shards if s.compressor is not None and s.compressor.rest is not None]
    masters = [shard.trained for shard in shards if shard.trained is not shard.parameters]
    state = [] if optimizer is None else [v for values in optimizer.state.values() for v in values.values()]
    return (
        _sizes(tensor for shard in shards for tensor in (shard.parameters, shard.vector.parameters)),
        _sizes([*(tensor for shard in shards for tensor in (shard.gradients, shard.vector.gradients)), *rests]),
        _sizes([*(value for value in state if isinstance(value, Tensor)), *masters]),
        _sizes(buffer for module in modules for buffer in module.buffers()),
    )


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


def size_text(value: float) -> str:
    """A number of bytes with the unit that suits it."""
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
