"""The state of training by names that no layout changes: what a rank has of it, keeps for all, and wants."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.build import BuiltLayers
from pipeline.chunks import Chunk, Described
from pipeline.gradients.flat import FROZEN
from pipeline.module import Tie
from pipeline.runner import Runner
from pipeline.stretches import Piece, Stretch
from pipeline.ties import Held, Role, owner_name, role
from pipeline.zero.shard import Shard

__all__ = ["BUFFER", "EXTRA", "OPTIMIZER", "WEIGHTS", "Entries", "Entry", "arrived", "hold", "kept", "shapes", "wanted"]

WEIGHTS, OPTIMIZER, BUFFER, EXTRA = "weights", "optimizer", "buffer", "extra"
"""The first words of names, as in ``weights.layers.3.attn.bias`` and ``buffer.3.norm.running_mean``."""


class Entry(NamedTuple):
    """What one rank has, or wants, of an entry of this shape: elements of it, flattened."""

    size: tuple[int, ...]
    chunks: list[Chunk]


Entries = dict[str, Entry]


def _add(entries: Entries, name: str, value: Tensor | Chunk) -> None:
    size = (value.numel,) if isinstance(value, Chunk) else tuple(value.shape)
    chunk = value if isinstance(value, Chunk) else Chunk(value.detach().reshape(-1), 0, value.numel())
    entries.setdefault(name, Entry(size, [])).chunks.append(chunk)


# -- what there is -------------------------------------------------------------------------------------------


def hold(runner: Runner) -> Entries:
    """All that this rank has of the state of training, as views; a rank that has an element has its newest value."""
    found: Entries = {}
    for name, chunk, _ in _weights(runner.built, runner.all_ties, Role.OWNER, Role.COPY):
        _add(found, name, chunk)
    if runner.update is not None:
        for stretch, parameter in runner.update.flat:
            for name, value in _state_of(runner.update.optimizer, stretch, parameter, runner.all_ties):
                _add(found, name, value)
    for held, module in _modules(runner.built):
        for name, buffer in module.named_buffers():
            _add(found, f"{BUFFER}.{held.layer}.{name}", buffer)
        for path, child in _with_extra(module):
            _add(found, f"{EXTRA}.{held.layer}.{path}", _packed(child.get_extra_state()))
    return found


def kept(runner: Runner, replica: int, replicas: int) -> Entries:
    """What this rank keeps for all in a checkpoint: together the ranks keep every element once.

    ``replica`` is the rank's place among those that hold the same stages; what all of these hold is shared out.
    Buffers that a module does not save are left out.
    """
    found: Entries = {}
    for name, chunk, everywhere in _weights(runner.built, runner.all_ties, Role.OWNER):
        _add(found, name, _part(chunk, replica, replicas) if everywhere else chunk)
    if runner.update is not None:
        whole = runner.zero == 0
        for stretch, parameter in runner.update.flat:
            if stretch.role is not Role.OWNER:
                continue
            for name, value in _state_of(runner.update.optimizer, stretch, parameter, runner.all_ties, first=True):
                if isinstance(value, Chunk):
                    _add(found, name, _part(value, replica, replicas) if whole else value)
                elif not whole or replica == 0:
                    _add(found, name, value)
    for held, module in _modules(runner.built):
        if held.copy or replica:
            continue
        for name, buffer in _saved_buffers(module):
            _add(found, f"{BUFFER}.{held.layer}.{name}", buffer)
        for path, child in _with_extra(module):
            _add(found, f"{EXTRA}.{held.layer}.{path}", _packed(child.get_extra_state()))
    return {name: entry for name, entry in found.items() if any(chunk.values.numel() for chunk in entry.chunks)}


def shapes(runner: Runner) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of this rank's layers, by the names that values of it have."""
    return {
        f"{WEIGHTS}.{owner_name(runner.all_ties, held.layer, slot.name)}": tuple(slot.shape)
        for held, flat in runner.built.flats.items()
        for slot in flat.slots
        if slot.numel
    }


def _part(chunk: Chunk, number: int, parts: int) -> Chunk:
    """One of so many nearly equal parts."""
    count = chunk.values.numel()
    start, stop = count * number // parts, count * (number + 1) // parts
    return Chunk(chunk.values[start:stop], chunk.offset + start, chunk.numel)


def _weights(
    built: BuiltLayers, ties: Sequence[Tie], *roles: Role, but: BuiltLayers | None = None
) -> Iterator[tuple[str, Chunk, bool]]:
    """What this rank has of every parameter with one of these roles, once, in the widest type it has there, and whether
    all replicas have the same of it; ``but`` has what to leave out."""
    for held, flat in built.flats.items():
        if but is not None and but.flats.get(held) is flat:
            continue
        for slot in flat.slots:
            shard = built.shards[held][slot.vector]
            if not slot.numel or role(ties, built.layers, held, slot.name) not in roles:
                continue
            values, first, everywhere = _newest(shard, slot.group == FROZEN)
            start, stop = max(slot.offset, first), min(slot.end, first + values.numel())
            if start < stop:
                name = f"{WEIGHTS}.{owner_name(ties, held.layer, slot.name)}"
                chunk = Chunk(values.detach()[start - first : stop - first], start - slot.offset, slot.numel)
                yield name, chunk, everywhere


def _newest(shard: Shard, frozen: bool) -> tuple[Tensor, int, bool]:
    """Where the newest values of a vector are, from which element on, and whether every replica has these."""
    if frozen and shard.zero < 3:  # never updated, so that all of it is there for good
        return shard.vector.parameters, 0, True
    return shard.trained, shard.start, shard.zero == 0


def _state_of(
    optimizer: Optimizer, stretch: Stretch, parameter: nn.Parameter, ties: Sequence[Tie], *, first: bool = False
) -> Iterator[tuple[str, Tensor | Chunk]]:
    """Each tensor of a parameter's state by name: what this rank holds of it, or what has no part for each element,
    such as the number of steps, of which with ``first`` only the holder of the first element tells."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            continue
        for piece in stretch.pieces:
            name = f"{OPTIMIZER}.{key}.{owner_name(ties, stretch.layer, piece.name)}"
            if value.shape == parameter.shape:
                yield name, _chunk(value, piece)
            elif not first or piece.offset == 0:  # a number, or what is kept of a matrix instead of it
                yield name, value


def _chunk(values: Tensor, piece: Piece) -> Chunk:
    return Chunk(values.view(-1)[piece.start : piece.stop], piece.offset, piece.numel)


def _modules(built: BuiltLayers) -> Iterator[tuple[Held, nn.Module]]:
    return ((held, layer.module) for held, layer in built.layers.items() if layer.module is not None)


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept_back = {
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in kept_back)


def _with_extra(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children whose class keeps more than parameters and buffers, by its own account."""
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield path, child


def _packed(state: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(state, stream)
    return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)


# -- what is to be filled ------------------------------------------------------------------------------------


def wanted(runner: Runner, stored: Mapping[str, Described], old: Runner | None = None) -> Entries:
    """Where this rank needs values of what is ``stored``, as views: everywhere, or where it has not taken over from
    ``old`` what was there.

    Parameters of the optimizer are given all the state that there is of them, 0 until it has been filled.
    """
    before = None if old is None else old.built
    found: Entries = {}
    for name, chunk, _ in _weights(runner.built, runner.all_ties, Role.OWNER, Role.COPY, but=before):
        _add(found, name, chunk)
    if runner.update is not None:
        flat = runner.update.flat if old is None else runner.update.fresh
        for name, value in _optimizer_targets(runner.update.optimizer, flat, runner.all_ties, stored):
            _add(found, name, value)
    for held, module in _fresh_modules(runner.built, before):
        if held.copy and Held(held.layer) in runner.built.layers:
            continue  # it gets those of the first copy
        for name, (dtype, size) in stored.items():
            if name.startswith(f"{EXTRA}.{held.layer}."):
                _add(found, name, torch.empty(size, dtype=dtype))
        for name, buffer in module.named_buffers():
            full = f"{BUFFER}.{held.layer}.{name}"
            if full in stored:
                _add(found, full, _of_size(module, name, buffer, stored[full].size))
    return found


def _optimizer_targets(
    optimizer: Optimizer,
    flat: Sequence[tuple[Stretch, nn.Parameter]],
    ties: Sequence[Tie],
    stored: Mapping[str, Described],
) -> Iterator[tuple[str, Tensor | Chunk]]:
    keys: dict[str, list[str]] = {}
    for full in stored:
        kind, _, rest = full.partition(".")
        key, _, owner = rest.partition(".")
        if kind == OPTIMIZER:
            keys.setdefault(owner, []).append(key)
    for stretch, parameter in flat:
        state: dict[str, Tensor] = {}
        for piece in stretch.pieces:
            owner = owner_name(ties, stretch.layer, piece.name)
            for key in keys.get(owner, ()):
                name = f"{OPTIMIZER}.{key}.{owner}"
                dtype, size = stored[name]
                if size == (piece.numel,):
                    whole = state.setdefault(key, torch.zeros(parameter.shape, dtype=dtype, device=parameter.device))
                    yield name, _chunk(whole, piece)
                else:
                    device = parameter.device if size else _scalar_device(optimizer, parameter)
                    yield name, state.setdefault(key, torch.zeros(size, dtype=dtype, device=device))
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def _scalar_device(optimizer: Optimizer, parameter: nn.Parameter) -> torch.device:
    """torch keeps an optimizer's step counters in host memory, unless the whole update runs on the device."""
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return parameter.device if on_device else torch.device("cpu")


def _of_size(module: nn.Module, name: str, buffer: Tensor, size: tuple[int, ...]) -> Tensor:
    """A buffer that has grown or shrunk since it was built gets the size that it has."""
    if tuple(buffer.shape) == size and buffer.is_contiguous():
        return buffer
    path, _, key = name.rpartition(".")
    grown = module.get_submodule(path)._buffers[key] = buffer.new_empty(size)
    return grown


def _fresh_modules(new: BuiltLayers, old: BuiltLayers | None) -> Iterator[tuple[Held, nn.Module]]:
    for held, module in _modules(new):
        if old is None or held not in old.layers or old.layers[held].module is not module:
            yield held, module


def arrived(runner: Runner, values: Entries, old: Runner | None = None, *, trusted: bool) -> None:
    """What follows when all that was ``wanted`` has been filled.

    ``trusted``: the values come from ranks of this run and not from a file, so that modules' extra state may be objects
    of any class.
    """
    before = None if old is None else old.built
    for held, flat in runner.built.flats.items():
        if before is None or before.flats.get(held) is not flat:
            for shard in runner.built.shards[held]:
                shard.updated()
    for held, module in _fresh_modules(runner.built, before):
        first = runner.built.layers.get(Held(held.layer))
        if held.copy and first is not None:
            runner.built.layers[held].buffers.unpack(first.buffers.packed())
        for path, child in _with_extra(module):
            found = values.get(f"{EXTRA}.{held.layer}.{path}")
            if found is not None:
                stream = io.BytesIO(found.chunks[0].values.numpy().tobytes())
                child.set_extra_state(torch.load(stream, weights_only=not trusted))
