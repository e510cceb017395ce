"""Building the layers of one rank: seeded by their own index, tied, flat, and split for backward."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeline.before import Before
from pipeline.comm.ways import Ways
from pipeline.errors import ModelError
from pipeline.gradients.binding import Binding
from pipeline.gradients.flat import FlatLayer, Sort
from pipeline.gradients.scratch import Scratch
from pipeline.gradients.split import split
from pipeline.layer import Layer, RandomSource
from pipeline.links.protocol import Group
from pipeline.module import LayerSpec, PipelineModule, Tie, TiedLayerSpec
from pipeline.precision.types import cast_for
from pipeline.random_state import key, preserved, seed_generator
from pipeline.stretches import Stretch, stretches
from pipeline.ties import Held, Role, owner_name, role, separate, share, tie_of
from pipeline.zero.shard import Shard

__all__ = [
    "NO_LAYERS",
    "BuiltLayers",
    "ParamGroups",
    "build_layers",
    "build_module",
    "check_ready_modules",
    "compile_layer",
    "layer_function",
]

ParamGroups = Callable[[str, torch.Size], Mapping[str, Any]]

_BUILDING = -1  # the "step" under whose key layers are initialised


def build_module(
    module: PipelineModule, index: int, random: RandomSource, dtype: torch.dtype | None = None
) -> nn.Module | None:
    """Build one layer as it is at the start of training, in ``dtype`` if one is given; None for a plain callable.

    The seed is that of the layer's own index, or of the first use where it is tied, so that the initial weights
    depend on nothing else.  A module that is in the list ready-made is taken as it is; where ranks are threads of
    one process it is copied, so that each has its own.
    """
    entry = module.entries[index]
    with random.lock or nullcontext():
        if isinstance(entry, LayerSpec | TiedLayerSpec):
            with preserved(random.device):
                seed_generator(random.device, key(random.seed, _BUILDING, 0, _first_use(module, index)))
                built = _made(entry, f"layer {index} ({module.type_of(index)})")
            if not isinstance(built, nn.Module):
                raise ModelError(f"layer {index}: {module.type_of(index)} made a {type(built).__name__}, not a module")
        elif isinstance(entry, nn.Module):
            built = copy.deepcopy(entry) if random.lock else entry
        else:
            return None
        return built.to(random.device, dtype)


def _made(entry: LayerSpec | TiedLayerSpec, name: str) -> nn.Module:
    try:
        return entry.factory(*entry.args, **entry.kwargs)
    except Exception as error:
        error.add_note(f"raised while {name} was built")
        raise


def _first_use(module: PipelineModule, index: int) -> int:
    entry = module.entries[index]
    if not isinstance(entry, TiedLayerSpec):
        return index
    return next(
        i for i, other in enumerate(module.entries) if isinstance(other, TiedLayerSpec) and other.key == entry.key
    )


def check_ready_modules(module: PipelineModule, group: Group) -> None:
    """Compare the initial values of ready-made modules between ranks, by hash.  Collective.

    Raises ``ModelError`` on every rank, naming the first layer that differs.
    """
    digests = {index: _digest(entry) for index, entry in enumerate(module.entries) if isinstance(entry, nn.Module)}
    for rank, others in enumerate(group.all_gather_object(digests)):
        differing = [index for index in digests if others.get(index) != digests[index]]
        if differing:
            raise ModelError(
                f"layer {differing[0]} ({module.type_of(differing[0])}) starts with other values on rank {rank} than "
                "here; seed the generator before building it, or use a LayerSpec, which needs no seed"
            )


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):  # what a module keeps by its own account
            digest.update(name.encode() + pickle.dumps(tensor))
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class BuiltLayers:
    """The layers of one rank, copies apart; and equal on all ranks, the settings of the optimizer's groups, and whether
    there is anything to train."""

    layers: Mapping[Held, Layer]
    flats: Mapping[Held, FlatLayer]
    shards: Mapping[Held, tuple[Shard, ...]]  # one for each vector
    groups: tuple[Mapping[str, Any], ...]
    trainable: bool
    uncut: bool
    how: tuple[Any, ...] = ()
    """What a vector depends on beside its layer and its ties: where it is equal, another layout may keep the vector."""

    def stretches(self, *roles: Role) -> list[Stretch]:
        """What this rank holds of all parameters with one of these roles, in layer order."""
        return stretches(self.flats, self.shards, *roles, uncut=self.uncut)


NO_LAYERS = BuiltLayers({}, {}, {}, (), False, False)


def build_layers(
    module: PipelineModule,
    held: Iterable[Held],
    ties: Sequence[Tie],
    random: RandomSource,
    pipeline: Group,
    ways: Ways,
    *,
    zero: int,
    uncut: bool,
    types: Sequence[torch.dtype | None],
    param_groups: ParamGroups | None,
    recompute: Sequence[int],
    reference_numerics: bool,
    compiler: str,
    before: Before,
) -> BuiltLayers:
    """Build the layers of this rank.  Collective over the pipeline, whose ranks agree on the optimizer's groups.

    ``ties`` are those of all copies of the model; ``zero`` says what of it replicas hold in parts, ``ways`` how they
    exchange it, and ``uncut`` that each parameter is in one of them; ``types`` are what each layer computes in.
    ``before`` is what this rank held in another layout: modules that are still here are taken on, with their vectors
    where they can stay.

    Raises ``ModelError`` when tied layers do not fit each other.
    """
    how = (id(ways), zero, uncut, reference_numerics, compiler)
    places = sorted(held)
    stays = before.staying(places, ties, types, how)
    modules = _modules(module, places, stays, random, types, before)
    real = {place: built for place, built in modules.items() if built is not None}
    group_of_name, groups, trainable = _agree_on_groups(real, ties, param_groups, pipeline)
    parts = len(ways.parameters.ranks) if zero else 1
    flats = {
        place: before.built.flats[place]
        if place in stays
        else _flatten(place, real, modules, ties, group_of_name, parts=parts, apart=zero >= 2, uncut=uncut)
        for place in real
    }
    share(ties, flats)
    shards = {
        place: before.built.shards[place]
        if place in stays
        else _shards(flat, ways, zero, master=types[place.layer] is not None)
        for place, flat in flats.items()
    }
    scratch = Scratch()
    layers = {}
    for place, built in modules.items():
        if place in stays:
            layers[place] = before.built.layers[place]
        else:
            flat, binding = flats.get(place), None
            if built is not None and flat is not None:
                compile_layer(built, compiler)
                binding = split(built, flat, scratch=scratch, reference_numerics=reference_numerics)
            layers[place] = _layer(module, place.layer, built, flat, binding, random, types)
        layers[place].recompute = place.layer in recompute
    return BuiltLayers(layers, flats, shards, groups, trainable, uncut, how)


def _shards(flat: FlatLayer, ways: Ways, zero: int, *, master: bool) -> tuple[Shard, ...]:
    """This rank's parts of a layer's vectors."""
    return tuple(
        Shard(
            vector,
            ways,
            zero,
            master=master,
            compressor=ways.compressor(
                vector.gradients, [(slot.offset, slot.shape) for slot in flat.slots if slot.vector == number]
            ),
        )
        for number, vector in enumerate(flat.vectors)
    )


def _layer(
    module: PipelineModule,
    index: int,
    built: nn.Module | None,
    flat: FlatLayer | None,
    binding: Binding | None,
    random: RandomSource,
    types: Sequence[torch.dtype | None],
) -> Layer:
    return Layer(
        index,
        f"{index} ({module.type_of(index)})",
        layer_function(module, index, built),
        random,
        module=built,
        flat=flat,
        binding=binding,
        cast=cast_for(types[index]),
    )


def _modules(
    module: PipelineModule,
    places: Sequence[Held],
    stays: Set[Held],
    random: RandomSource,
    types: Sequence[torch.dtype | None],
    before: Before,
) -> dict[Held, nn.Module | None]:
    """The module of each layer, no two of which share anything; those that were here before are taken on."""
    found: dict[Held, nn.Module | None] = {}
    before.release([p for p in before.built.layers if p not in stays and (p in places or _is_ready(module, p))])
    for place in sorted(places, key=lambda place: (place not in stays, place)):  # those keep what they share
        dtype = types[place.layer]
        if before.fits(place, dtype):
            own = before.built.layers[place].module
            found[place] = own if own is None or place in stays else own.to(random.device, dtype)
        else:
            found[place] = build_module(module, place.layer, random, dtype)
    found |= separate({place: built for place, built in found.items() if built is not None})
    before.freeze({place: built for place, built in found.items() if built is not None})
    return {place: found[place] for place in places}


def _is_ready(module: PipelineModule, place: Held) -> bool:
    return isinstance(module.entries[place.layer], nn.Module)


def _flatten(
    place: Held,
    real: Mapping[Held, nn.Module],
    modules: Mapping[Held, nn.Module | None],
    ties: Sequence[Tie],
    group_of_name: Mapping[str, int],
    *,
    parts: int,
    apart: bool,
    uncut: bool,
) -> FlatLayer:
    """One layer's vectors, in so many parts; ``apart``: biases, whose gradients come with I, lie by themselves."""

    def group_of(name: str, _: nn.Parameter) -> int:
        return group_of_name[owner_name(ties, place.layer, name)] * len(Role) + role(ties, modules, place, name)

    def sort_of(name: str, parameter: nn.Parameter) -> Sort:
        return Sort(tie_of(ties, place.layer, name), parameter.dim() >= 2 or not apart)  # all uses are cut alike

    return FlatLayer(real[place], group_of=group_of, sort_of=sort_of, parts=parts, uncut=uncut)


def compile_layer(built: nn.Module, compiler: str) -> None:
    """Let torch.compile compile the layer when it is first called, in place, so that its names stay as they are."""
    if compiler != "none":
        built.compile(backend=compiler)


def layer_function(module: PipelineModule, index: int, built: nn.Module | None) -> Callable[[Any], Any]:
    """What is called with the output of the layer before: the built module, in the way its entry says."""
    entry = module.entries[index]
    if built is None:
        return entry  # type: ignore[return-value]
    if isinstance(entry, TiedLayerSpec) and entry.forward is not None:
        return partial(entry.forward, built)
    return built


def _agree_on_groups(
    modules: Mapping[Held, nn.Module], ties: Sequence[Tie], param_groups: ParamGroups | None, pipeline: Group
) -> tuple[dict[str, int], tuple[Mapping[str, Any], ...], bool]:
    """Number the optimizer's groups in the order in which layers first ask for them; every use of a tied parameter
    asks under the same name.  Also tells whether any parameter of the model is trainable."""
    mine = []
    for (index, _), built in modules.items():
        for name, parameter in built.named_parameters():
            full = owner_name(ties, index, name)
            settings = dict(param_groups(full, parameter.shape)) if param_groups else {}
            mine.append((index, full, settings, parameter.requires_grad))
    everyone = sorted((entry for rank in pipeline.all_gather_object(mine) for entry in rank), key=lambda e: e[0])
    groups: list[Mapping[str, Any]] = []
    number = {}
    for _, full, settings, _ in everyone:
        if settings not in groups:
            groups.append(settings)
        number[full] = groups.index(settings)
    return number, tuple(groups), any(trainable for *_, trainable in everyone)
