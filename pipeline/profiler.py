"""What each layer costs, measured on a real micro-batch: one layer at a time is built, timed and freed."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partition import LayerCost, Profile
from pipeline.batch import Item, rows_of
from pipeline.build import build_module, compile_layer, layer_function
from pipeline.device import set_threads, synchronise
from pipeline.gradients.flat import FlatLayer
from pipeline.gradients.split import split
from pipeline.layer import Layer, Place, RandomSource
from pipeline.links.protocol import LANE_F, Link
from pipeline.mesh import Mesh, make_mesh
from pipeline.module import PipelineModule
from pipeline.precision.types import cast_for, loss_cast
from pipeline.random_state import preserved
from pipeline.shapes import Value, entering
from pipeline.speeds import rank_speeds, slowest_copies
from pipeline.stage import with_targets

__all__ = ["count_parameters", "measure_hop", "profile_alone", "profile_layers", "round_trip"]

_WARM_UP_RUNS = 2
_HOP_ROUNDS = 20
_HOP_PAUSE = 0.005  # seconds


def profile_layers(
    module: PipelineModule,
    item: Item,
    random: RandomSource,
    mesh: Mesh,
    *,
    runs: int,
    recompute: Sequence[int],
    threads: int,
    compiler: str = "none",
    types: Sequence[torch.dtype | None] | None = None,
) -> Profile:
    """Time the forward, I and W of every layer on one micro-batch.  Collective.

    All ranks time the same layer at the same time, as they will share caches and memory bandwidth in training; a
    cost is the mean over ranks of the median over ``runs`` warm runs, each at speed 1 (``rank_speeds``).  The loss
    counts to the last layer.  Nothing of the model that will be trained is touched: the layers are built for this and
    freed again.
    """
    value = entering(item.inputs)
    measured: list[LayerCost] = []
    with preserved(random.device):
        for index in range(len(module)):
            try:
                dtype = None if types is None else types[index]
                layer = _built(module, index, random, dtype, recompute=index in recompute, compiler=compiler)
                value, cost = _measure_layer(layer, value, module.type_of(index), mesh, runs=runs)
            except Exception as error:
                error.add_note(f"raised in layer {index} ({module.type_of(index)}), as layers were timed for the cuts")
                raise
            measured.append(cost)
        loss = Layer(len(module), "loss", lambda pair: module.loss_fn(*pair), random, cast=loss_cast(types or ()))
        _, cost = _measure(loss, with_targets(value, item.targets), "loss", mesh, runs)
    measured[-1] = measured[-1].model_copy(
        update={name: getattr(measured[-1], name) + getattr(cost, name) for name in _ADDED_BY_LOSS}
    )
    by_rank: list[list[LayerCost]] = mesh.world.all_gather_object(measured)
    speeds = rank_speeds([[layer.seconds for layer in own] for own in by_rank])
    layers = [_mean(costs, speeds) for costs in zip(*by_rank, strict=True)]
    hop = measure_hop(mesh, int(statistics.median(layer.output_bytes for layer in layers)))
    return Profile(
        layers=tuple(layers),
        hop=hop,
        rows=rows_of(item),
        device=str(mesh.device.type),
        threads=threads,
        speeds=slowest_copies(speeds, mesh.columns()),
    )


def profile_alone(
    module: PipelineModule,
    item: Item,
    *,
    seed: int = 0,
    runs: int = 5,
    threads: int = 1,
    recompute: Sequence[int] = (),
    types: Sequence[torch.dtype | None] | None = None,
) -> Profile:
    """The same outside of training, in this process alone; no message is timed, so that ``hop`` is 0."""
    mesh = make_mesh()
    set_threads(threads)
    random = RandomSource(seed, mesh.device, mesh.random_lock)
    return profile_layers(
        module, Item(*item), random, mesh, runs=runs, recompute=recompute, threads=threads, types=types
    )


_ADDED_BY_LOSS = ("forward", "input_grad", "activation_bytes")
_TIMES = ("forward", "input_grad", "weight_grad")


def _mean(costs: Sequence[LayerCost], speeds: Sequence[float]) -> LayerCost:
    at_speed_1 = {
        t: statistics.fmean(getattr(cost, t) * speed for cost, speed in zip(costs, speeds, strict=True)) for t in _TIMES
    }
    return costs[0].model_copy(update=at_speed_1)


def _measure_layer(layer: Layer, value: Value, kind: str, mesh: Mesh, *, runs: int) -> tuple[Value, LayerCost]:
    result = _measure(layer, value, kind, mesh, runs)
    for vector in layer.flat.vectors if layer.flat is not None else ():
        for tensor in (vector.parameters, vector.gradients):  # now, and not when Python looks for cycles
            tensor.untyped_storage().resize_(0)
    return result


def _built(
    module: PipelineModule,
    index: int,
    random: RandomSource,
    dtype: torch.dtype | None,
    *,
    recompute: bool,
    compiler: str,
) -> Layer:
    entry = module.entries[index]
    built = copy.deepcopy(entry) if isinstance(entry, nn.Module) else build_module(module, index, random)
    if built is None:
        function: Any = entry
        return Layer(index, module.type_of(index), function, random, recompute=recompute, cast=cast_for(dtype))
    flat = FlatLayer(built.to(random.device, dtype))
    compile_layer(built, compiler)
    return Layer(
        index,
        module.type_of(index),
        layer_function(module, index, built),
        random,
        module=built,
        flat=flat,
        binding=split(built, flat),
        recompute=recompute,
        cast=cast_for(dtype),
    )


def _measure(layer: Layer, value: Value, kind: str, mesh: Mesh, runs: int) -> tuple[Value, LayerCost]:
    mesh.world.barrier()
    times = []
    for _ in range(_WARM_UP_RUNS + runs):
        started = _now(mesh)
        output, call = layer.forward(value, Place.at(0, 0, 0))
        ones = [
            torch.ones_like(leaf) for leaf, needs in zip(output.leaves, output.needs_gradient, strict=True) if needs
        ]
        forward = _now(mesh)
        layer.backward(call, ones, 1.0, defer=True)
        backward = _now(mesh)
        waiting = call.queue.nbytes
        layer.weight_gradients(call)
        times.append((forward - started, backward - forward, _now(mesh) - backward))
    forward, input_grad, weight_grad = (statistics.median(t) for t in zip(*times[_WARM_UP_RUNS:], strict=True))
    parameters = [] if layer.module is None else list(layer.module.parameters())
    buffers = [] if layer.module is None else list(layer.module.buffers())
    cost = LayerCost(
        name=f"layers.{layer.index}",
        type=kind,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        activation_bytes=_kept_bytes(layer, value, parameters),
        weight_grad_bytes=waiting,
        output_bytes=_bytes(output.leaves),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=_bytes(parameters),
        buffer_bytes=_bytes(buffers),
    )
    # Copies: an output may lie in the memory of a parameter, which is freed.
    return Value([x.detach().clone() if isinstance(x, Tensor) else x for x in output.leaves], *output[1:]), cost


def _now(mesh: Mesh) -> float:
    synchronise(mesh.device)
    return time.perf_counter()


def _bytes(leaves: Iterable[Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def _kept_bytes(layer: Layer, value: Value, parameters: Sequence[Tensor]) -> int:
    """Bytes that one micro-batch keeps alive from F to I, parameters not counted; each storage once.

    Of the input, which may be cut from a whole batch, its own part.
    """
    storages: dict[int, int] = {}
    inputs = {x.untyped_storage().data_ptr(): x.nbytes for x in value.leaves if isinstance(x, Tensor)}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        storages[place] = inputs.get(place, tensor.untyped_storage().nbytes())
        return tensor

    if layer.recompute:
        for leaf in value.leaves:
            if isinstance(leaf, Tensor):
                keep(leaf)
    else:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            layer.forward(value, Place.at(0, 0, 0))
    for parameter in parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def count_parameters(module: PipelineModule, random: RandomSource) -> list[int]:
    """The number of parameters of each layer; one layer at a time is built and freed."""
    return [_count(module, index, random) for index in range(len(module))]


def _count(module: PipelineModule, index: int, random: RandomSource) -> int:
    entry = module.entries[index]
    built = entry if isinstance(entry, nn.Module) else build_module(module, index, random)
    return 0 if built is None else sum(p.numel() for p in built.parameters())


def measure_hop(mesh: Mesh, size: int) -> float:
    """Seconds that a message of ``size`` bytes takes from one rank to the next: half of a round trip.  Collective.

    Each follows a pause, since in a step messages come to ranks that have waited, which takes longer.  Ranks 0 and 1
    of each pipeline play; all ranks return the mean over pipelines, 0 where a pipeline is one rank.
    """
    mine = None
    firsts = [mesh.world_rank(data, 0) for data in range(mesh.data)] if mesh.pipe > 1 else []
    mesh.link.connect([pair for first in firsts for pair in ((first, first + 1), (first + 1, first))])
    if mesh.pipe > 1 and mesh.pipe_rank < 2:
        peer, begins = mesh.world_rank(mesh.data_rank, 1 - mesh.pipe_rank), mesh.pipe_rank == 0
        ball = torch.zeros(max(size, 1), dtype=torch.uint8, device=mesh.device)
        trips = [round_trip(mesh.link, peer, ball, begins=begins, pause=_HOP_PAUSE) for _ in range(_HOP_ROUNDS)]
        mine = statistics.median(trips) / 2 if begins else None
    found = [hop for hop in mesh.world.all_gather_object(mine) if hop is not None]
    return statistics.fmean(found) if found else 0.0


def round_trip(link: Link, peer: int, ball: Tensor, *, begins: bool, pause: float) -> float:
    """Seconds for a tensor to a peer and back, on the rank that begins, after a pause; 0 on the one that returns it."""
    if not begins:
        link.receive(peer, ball, LANE_F).wait()
        link.send(peer, ball, LANE_F).wait()
        synchronise(ball.device)
        return 0.0
    time.sleep(pause)
    started = time.perf_counter()
    link.send(peer, ball, LANE_F).wait()
    link.receive(peer, ball, LANE_F).wait()
    synchronise(ball.device)
    return time.perf_counter() - started
