"""State in motion: what ranks hold in one layout becomes what they hold in another, each value from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.build import BuiltLayers
from pipeline.chunks import Chunk, Described
from pipeline.entries import Entries, Entry, arrived, wanted
from pipeline.errors import StateError
from pipeline.links.protocol import LANE_CONTROL
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.runner import Runner

__all__ = ["Moved", "move"]


class Told(NamedTuple):
    """What the others are told of an entry: its type, its shape, and which elements this rank has."""

    dtype: torch.dtype
    size: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Moved(NamedTuple):
    """What a move came to, over all ranks."""

    bytes: int  # that went from rank to rank
    layers: tuple[int, ...]  # some of whose values did


@torch.no_grad()
def move(holding: Entries, old: Runner, new: Runner, module: PipelineModule, mesh: Mesh) -> Moved:
    """Fill everything that ``new`` has not taken over from ``old``.  Collective over all ranks.

    Every element comes from this rank itself where it has it, else from the one of its holders that has the least to
    send; nothing passes through a third rank, and no rank ever has more of the model than it holds before or after.
    """
    told = mesh.world.all_gather_object({name: _told(entry) for name, entry in holding.items()})
    there = {name: Described(entry.dtype, entry.size) for rank in told for name, entry in rank.items()}
    needed = wanted(new, there, old)
    wants = mesh.world.all_gather_object({name: list(map(_span, e.chunks)) for name, e in needed.items()})
    routes = list(_routes(told, wants))
    mesh.link.connect(sorted({(route.source, route.target) for route in routes if route.source != route.target}))
    arriving, leaving = [], []
    for route in routes:
        if route.target == mesh.rank:
            target = _cut(needed[route.name], route.start, route.stop)
            if route.source == mesh.rank:
                target.copy_(_cut(holding[route.name], route.start, route.stop))
            else:
                dtype = told[route.source][route.name].dtype
                buffer = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
                arriving.append((mesh.link.receive(route.source, buffer, LANE_CONTROL), buffer, target))
        elif route.source == mesh.rank:
            part = _cut(holding[route.name], route.start, route.stop)
            leaving.append(mesh.link.send(route.target, part, LANE_CONTROL))
    for pending, buffer, target in arriving:
        pending.wait()
        if buffer is not target:
            target.copy_(buffer)
    for pending in leaving:
        pending.wait()
    arrived(new, needed, old, trusted=True)
    _let_go(old.built, new.built, module)
    far = [route for route in routes if route.source != route.target]
    size = sum((r.stop - r.start) * told[r.source][r.name].dtype.itemsize for r in far)
    return Moved(size, tuple(sorted({_layer_of(route.name) for route in far})))


def _told(entry: Entry) -> Told:
    return Told(entry.chunks[0].values.dtype, entry.size, tuple(map(_span, entry.chunks)))


def _span(chunk: Chunk) -> tuple[int, int]:
    return chunk.offset, chunk.offset + chunk.values.numel()


class _Route(NamedTuple):
    """Elements of an entry that go from one rank to another, or stay on one."""

    name: str
    start: int
    stop: int
    source: int
    target: int


def _routes(
    told: Sequence[Mapping[str, Told]], wants: Sequence[Mapping[str, Sequence[tuple[int, int]]]]
) -> Iterator[_Route]:
    """How each rank gets what it wants, the same list on every rank."""
    holders: dict[str, list[tuple[int, int, int]]] = {}
    for rank, entries in enumerate(told):
        for name, entry in entries.items():
            holders.setdefault(name, []).extend((rank, start, stop) for start, stop in entry.spans)
    load = [0] * len(told)
    for target, spans in enumerate(wants):
        for name in sorted(spans):
            for start, stop in spans[name]:
                while start < stop:
                    having = [h for h in holders.get(name, ()) if h[1] <= start < h[2]]
                    if not having:
                        raise StateError(f"no rank has element {start} of {name}, which rank {target} needs")
                    source, _, end = min(having, key=lambda h: (h[0] != target, load[h[0]], h[0]))
                    end = min(end, stop)
                    load[source] += (end - start) * told[source][name].dtype.itemsize * (source != target)
                    yield _Route(name, start, end, source, target)
                    start = end


def _cut(entry: Entry, start: int, stop: int) -> Tensor:
    """These elements of an entry, which are in one of its chunks."""
    chunk = next(c for c in entry.chunks if c.offset <= start and stop <= c.offset + c.values.numel())
    return chunk.values[start - chunk.offset : stop - chunk.offset]


def _layer_of(name: str) -> int:
    return next(int(word) for word in name.split(".") if word.isdecimal())


def _let_go(old: BuiltLayers, new: BuiltLayers, module: PipelineModule) -> None:
    """Free the vectors that are not used any more, now and not when Python looks for cycles."""
    for held, flat in old.flats.items():
        if new.flats.get(held) is flat:
            continue
        lives_on = isinstance(module.entries[held.layer], nn.Module) and held not in new.flats
        for vector in flat.vectors:
            for tensor in (vector.gradients,) if lives_on else vector[:2]:
                tensor.untyped_storage().resize_(0)
