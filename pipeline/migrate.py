"""State in motion: what ranks hold in one layout becomes what they hold in another, each value from rank to rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.build import BuiltLayers
from pipeline.checkpoint import optimizer_entries, optimizer_targets
from pipeline.chunks import Chunk, Described
from pipeline.errors import StateError
from pipeline.gradients.flat import FROZEN
from pipeline.links.protocol import LANE_CONTROL
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule, Tie
from pipeline.runner import Runner
from pipeline.ties import Held, Role, owner_name, role

__all__ = ["Moved", "hold", "move"]


class Entry(NamedTuple):
    """What one rank has, or wants, of an entry of this shape: elements of it, flattened."""

    size: tuple[int, ...]
    chunks: list[Chunk]


Entries = dict[str, Entry]


class Told(NamedTuple):
    """What the others are told of an entry: its type, its shape, and which elements this rank has."""

    dtype: torch.dtype
    size: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Moved(NamedTuple):
    """What a move came to, over all ranks."""

    bytes: int  # that went from rank to rank
    layers: tuple[int, ...]  # some of whose values did


def hold(runner: Runner) -> Entries:
    """All that this rank has of the state of training, as views; a rank that has an element has its newest value."""
    found: Entries = {}
    for name, chunk in _weights(runner.built, runner.all_ties):
        _add(found, name, chunk)
    if runner.update is not None:
        for name, value in optimizer_entries(runner.update.optimizer, runner.update.flat, runner.all_ties).items():
            _add(found, name, value)
    for held, layer in runner.built.layers.items():
        if layer.module is not None:
            for name, buffer in layer.module.named_buffers():
                _add(found, f"{_BUFFER}.{held.layer}.{name}", buffer)
            for path, child in _with_extra(layer.module):
                _add(found, f"{_EXTRA}.{held.layer}.{path}", _pickled(child.get_extra_state()))
    return found


def _add(entries: Entries, name: str, value: Tensor | Chunk) -> None:
    size = (value.numel,) if isinstance(value, Chunk) else tuple(value.shape)
    chunk = value if isinstance(value, Chunk) else Chunk(value.detach().reshape(-1), 0, value.numel())
    entries.setdefault(name, Entry(size, [])).chunks.append(chunk)


_BUFFER, _EXTRA = "buffer", "extra"


def _weights(built: BuiltLayers, ties: Sequence[Tie], *, but: BuiltLayers | None = None) -> Iterator[tuple[str, Chunk]]:
    """What this rank has of every parameter, once, in the widest type it has there; ``but`` has what to leave out."""
    for held, flat in built.flats.items():
        if but is not None and but.flats.get(held) is flat:
            continue
        for slot in flat.slots:
            shard = built.shards[held][slot.vector]
            if not slot.numel or role(ties, built.layers, held, slot.name) is Role.ALIAS:
                continue
            values, first = shard.trained, shard.start
            if slot.group == FROZEN and shard.zero < 3:  # never updated, so that all of it is there for good
                values, first = shard.vector.parameters, 0
            start, stop = max(slot.offset, first), min(slot.end, first + values.numel())
            if start < stop:
                name = f"weights.{owner_name(ties, held.layer, slot.name)}"
                yield name, Chunk(values.detach()[start - first : stop - first], start - slot.offset, slot.numel)


def _with_extra(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children whose class keeps more than parameters and buffers, by its own account."""
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield path, child


def _pickled(state: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


@torch.no_grad()
def move(holding: Entries, old: Runner, new: Runner, module: PipelineModule, mesh: Mesh) -> Moved:
    """Fill everything that ``new`` has not taken over from ``old``.  Collective over all ranks.

    Every element comes from this rank itself where it has it, else from the one of its holders that has the least to
    send; nothing passes through a third rank, and no rank ever has more of the model than it holds before or after.
    """
    told = mesh.world.all_gather_object({name: _told(entry) for name, entry in holding.items()})
    there = {name: Described(entry.dtype, entry.size) for rank in told for name, entry in rank.items()}
    wanted = _wanted(old, new, there)
    wants = mesh.world.all_gather_object({name: list(map(_span, e.chunks)) for name, e in wanted.items()})
    routes = list(_routes(told, wants))
    mesh.link.connect(sorted({(route.source, route.target) for route in routes if route.source != route.target}))
    arriving, leaving = [], []
    for route in routes:
        if route.target == mesh.rank:
            target = _cut(wanted[route.name], route.start, route.stop)
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
    _complete(old, new, wanted)
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


def _wanted(old: Runner, new: Runner, stored: Mapping[str, Described]) -> Entries:
    """Where the values go that this rank has not got in place."""
    found: Entries = {}
    for name, chunk in _weights(new.built, new.all_ties, but=old.built):
        _add(found, name, chunk)
    if new.update is not None:
        optimizer = new.update.optimizer
        for name, value in optimizer_targets(optimizer, new.update.fresh, new.all_ties, stored).items():
            _add(found, name, value)
    for held, module in _fresh_modules(old.built, new.built):
        for name, (dtype, size) in stored.items():
            if name.startswith(f"{_EXTRA}.{held.layer}."):
                _add(found, name, torch.empty(size, dtype=dtype))
        for name, buffer in module.named_buffers():
            full = f"{_BUFFER}.{held.layer}.{name}"
            if full in stored:
                _add(found, full, _of_size(module, name, buffer, stored[full].size))
    return found


def _of_size(module: nn.Module, name: str, buffer: Tensor, size: tuple[int, ...]) -> Tensor:
    """A buffer that has grown or shrunk since it was built gets the size that it has."""
    if tuple(buffer.shape) == size and buffer.is_contiguous():
        return buffer
    path, _, key = name.rpartition(".")
    grown = module.get_submodule(path)._buffers[key] = buffer.new_empty(size)
    return grown


def _fresh_modules(old: BuiltLayers, new: BuiltLayers) -> Iterator[tuple[Held, nn.Module]]:
    for held, layer in new.layers.items():
        if layer.module is not None and (held not in old.layers or old.layers[held].module is not layer.module):
            yield held, layer.module


def _complete(old: Runner, new: Runner, wanted: Entries) -> None:
    """What follows from values that have arrived."""
    for held, flat in new.built.flats.items():
        if old.built.flats.get(held) is not flat:
            for shard in new.built.shards[held]:
                shard.updated()
    for held, module in _fresh_modules(old.built, new.built):
        first = new.built.layers.get(Held(held.layer))
        if held.copy and first is not None:
            new.built.layers[held].buffers.unpack(first.buffers.packed())
        for path, child in _with_extra(module):
            (state,) = wanted[f"{_EXTRA}.{held.layer}.{path}"].chunks
            child.set_extra_state(pickle.loads(state.values.numpy().tobytes()))


def _let_go(old: BuiltLayers, new: BuiltLayers, module: PipelineModule) -> None:
    """Free the vectors that are not used any more, now and not when Python looks for cycles."""
    for held, flat in old.flats.items():
        if new.flats.get(held) is flat:
            continue
        lives_on = isinstance(module.entries[held.layer], nn.Module) and held not in new.flats
        for vector in flat.vectors:
            for tensor in (vector.gradients,) if lives_on else vector[:2]:
                tensor.untyped_storage().resize_(0)
