"""The memory that every rank is predicted to need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partition.costs import LayerCost, Profile, check_fit
from partition.errors import OutOfMemory, PartitionError
from partition.partition import Partition
from schedules import Schedule
from schedules.table import KIND, STAGE, B, F, I, W

Floats = NDArray[np.float64]


_GRADIENT = 4.0  # bytes of an element that a layer's backward adds to


class StateBytes(NamedTuple):
    """Bytes kept for every parameter beside the parameter itself, and which part of that is kept."""

    gradient: float = 4.0
    """Gradients are summed in fp32 at least."""
    optimizer: float = 8.0
    """Two moments in fp32, as Adam keeps them; 0 for plain SGD, 4 with momentum."""
    parameter: float = 1.0
    """The part of a parameter that is kept between its uses."""
    master: float = 0.0
    """For every parameter of 16 bits, what the optimizer steps on instead: 4 for a copy in fp32."""
    whole_parameters: int = 0
    """Layers whose parameters are whole at once while they are used, where only a part is kept."""
    whole_gradients: int = 0
    """Layers whose gradients are."""

    def in_parts(self, zero: int, ranks: int, *, whole_layers: int = 2) -> StateBytes:
        """What is left on each of so many data-parallel ranks by this stage of ZeRO."""
        if ranks == 1:
            return self
        return StateBytes(
            self.gradient / (ranks if zero >= 2 else 1),
            self.optimizer / (ranks if zero >= 1 else 1),
            self.parameter / (ranks if zero >= 3 else 1),
            self.master / (ranks if zero >= 1 else 1),
            whole_layers if zero >= 3 else 0,
            1 if zero >= 2 else 0,
        )

    def whole(self, layers: Sequence[LayerCost]) -> float:
        """The most bytes of these layers that are whole at once beside the parts."""
        parameters = sorted((layer.parameter_bytes for layer in layers), reverse=True)
        gradients = sorted((_GRADIENT * layer.parameters for layer in layers), reverse=True)
        return sum(parameters[: self.whole_parameters]) + sum(gradients[: self.whole_gradients])

    def optimizer_of(self, layer: LayerCost) -> float:
        """Bytes of a layer's optimizer state, with the weights in fp32 that it steps on."""
        narrow = layer.parameters > 0 and layer.parameter_bytes <= 2 * layer.parameters
        return (self.optimizer + (self.master if narrow else 0.0)) * layer.parameters


class RankMemory(NamedTuple):
    """Bytes of one rank at its fullest moment."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    messages: float
    whole: float = 0.0
    """Of layers in use, what data-parallel ranks hold in parts otherwise."""

    @property
    def total(self) -> float:
        return sum(self)


def predict_memory(
    profile: Profile, partition: Partition, schedule: Schedule, state: StateBytes | None = None
) -> tuple[RankMemory, ...]:
    """One a rank. Raises ProfileError or PartitionError when the three do not belong together.

    Activations are the most that is alive at once: a rank runs its row in order, so when things happen does
    not matter. Messages are one buffer for each message that a stage sends to or gets from another rank for a
    micro-batch. Temporaries inside a layer are not counted.
    """
    check_fit(profile, partition, schedule)
    state = state or StateBytes()
    groups = [[profile.layers[layer] for layer in partition.layers_of(g)] for g in schedule.layer_group_of_stage]
    activations = peak_activations(groups, schedule)
    entering = [profile.layers[cut - 1].output_bytes if cut else 0 for cut in partition.cuts[:-1]]
    messages = message_bytes(schedule, entering)
    found = []
    for rank in range(schedule.ranks):
        layers = [layer for stage in schedule.stages_of_rank(rank) for layer in groups[stage]]
        parameters = sum(layer.parameters for layer in layers)
        trained = 0 if schedule.forward_only else parameters
        found.append(
            RankMemory(
                parameters=state.parameter * sum(layer.parameter_bytes for layer in layers),
                gradients=state.gradient * trained,
                optimizer=0.0 if schedule.forward_only else sum(map(state.optimizer_of, layers)),
                buffers=float(sum(layer.buffer_bytes for layer in layers)),
                activations=activations[rank],
                messages=messages[rank],
                whole=state.whole(layers),
            )
        )
    return tuple(found)


def peak_activations(groups: list[list[LayerCost]], schedule: Schedule) -> list[float]:
    """The most bytes of activations alive at once on each rank; ``groups`` are the layers of each stage."""
    if schedule.forward_only:
        # A layer's output outlives nothing but the next layer's forward.
        outputs = [[0, *(layer.output_bytes for layer in group)] for group in groups]
        widest = [max(map(sum, pairwise(sizes)), default=0) for sizes in outputs]
        stages = map(schedule.stages_of_rank, range(schedule.ranks))
        return [float(max((widest[stage] for stage in own), default=0)) for own in stages]
    return [float(most) for most in most_alive(schedule, changes_of(groups))]


def changes_of(groups: list[list[LayerCost]]) -> Floats:
    """(kinds, stages): the bytes that a pass leaves alive on its stage, negative where it frees."""
    kept = np.array([sum(layer.activation_bytes for layer in group) for group in groups], dtype=np.float64)
    queued = np.array([sum(layer.weight_grad_bytes for layer in group) for group in groups], dtype=np.float64)
    change = np.zeros((4, len(groups)))
    change[F], change[B], change[I], change[W] = kept, -kept, queued - kept, -queued
    return change


def most_alive(schedule: Schedule, change: Floats) -> list[float]:
    """The highest running sum of ``change`` (kinds, stages) along the row of each rank."""
    found = []
    for rank in range(schedule.ranks):
        table = schedule.table(rank)
        found.append(float(np.cumsum(change[table[:, KIND], table[:, STAGE]]).max(initial=0.0)))
    return found


def message_bytes(schedule: Schedule, entering: Sequence[float]) -> list[float]:
    """Bytes of a buffer for every message of a rank; ``entering``: of what enters each group of layers."""
    ways = 1 if schedule.forward_only else 2
    found = [0.0] * schedule.ranks
    for source, target in {edge for route in schedule.routes for edge in pairwise(route)}:
        ends = schedule.rank_of_stage[source], schedule.rank_of_stage[target]
        if ends[0] != ends[1]:
            for rank in ends:
                found[rank] += ways * entering[schedule.layer_group_of_stage[target]]
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory caps in the form that ``split`` takes, on the safe side: what fits them fits the ranks."""

    carriers: tuple[int, ...]
    """Which ranks carry each part, as a number: parts that share their ranks have the same one."""
    memory: Floats
    """(parts, layers): the most bytes that a layer needs in a part."""
    rank_caps: tuple[float, ...]
    """Bytes for all parts of a carrier together."""

    def fit(self, cuts: Sequence[int]) -> bool:
        held = [float(self.memory[part, begin:end].sum()) for part, (begin, end) in enumerate(pairwise(cuts))]
        used = np.bincount(self.carriers, weights=held)
        return bool((used <= np.array(self.rank_caps)).all())


def carriers(schedule: Schedule) -> tuple[int, ...]:
    """A number for each group of layers, the same for groups that are on the same ranks.

    Ordinarily that is the rank. With two copies of the weights, groups g and p - 1 - g are both on ranks g
    and p - 1 - g.
    """
    ranks: list[set[int]] = [set() for _ in range(schedule.num_layer_groups)]
    for group, rank in zip(schedule.layer_group_of_stage, schedule.rank_of_stage, strict=True):
        ranks[group].add(rank)
    kinds = sorted({tuple(sorted(own)) for own in ranks})
    return tuple(kinds.index(tuple(sorted(own))) for own in ranks)


def limits(
    profile: Profile, schedule: Schedule, cap: float | Sequence[float], state: StateBytes | None = None
) -> Limits:
    """What fits into ``cap`` bytes, one number or one a rank, whatever the cuts will be.

    A rank's need is taken as the sum of the largest needs of its stages, and every message as the largest
    there can be: with several stages a rank, a partition that would just fit may be refused.
    """
    state = state or StateBytes()
    layers, ranks = profile.layers, schedule.ranks
    given = np.asarray(cap, dtype=np.float64)
    if given.shape not in ((), (ranks,)):
        raise PartitionError(f"memory_cap is {cap}: give one number of bytes, or one for each of {ranks} ranks")
    trains = not schedule.forward_only
    fixed = np.array(
        [
            state.parameter * layer.parameter_bytes
            + layer.buffer_bytes
            + trains * (state.gradient * layer.parameters + state.optimizer_of(layer))
            for layer in layers
        ]
    )
    kept = np.array([layer.activation_bytes for layer in layers])
    queued = np.array([layer.weight_grad_bytes for layer in layers])
    memory = np.zeros((schedule.num_layer_groups, len(layers)))
    largest = float(max(layer.output_bytes for layer in layers))
    messages = message_bytes(schedule, [largest] * schedule.num_layer_groups)
    whole = state.whole(layers)
    left = given - messages - whole
    if not (left > 0).all():
        need = max(messages) + whole
        what = "messages and layers that are whole while in use" if whole else "messages"
        raise OutOfMemory(f"memory_cap is {cap} bytes, of which {what} alone need {need:.0f}; raise memory_cap")
    number = carriers(schedule)
    caps = [np.inf] * (max(number) + 1)
    for stage, group in enumerate(schedule.layer_group_of_stage):
        held, waiting = in_flight(schedule, stage)
        memory[group] = np.maximum(memory[group], fixed + held * kept + waiting * queued)
        caps[number[group]] = min(caps[number[group]], float(left[schedule.rank_of_stage[stage]]))
    return Limits(number, memory, tuple(caps))


def in_flight(schedule: Schedule, stage: int) -> tuple[int, int]:
    """The most micro-batches of a stage that are between F and I (or B), and between I and W."""
    if schedule.forward_only:
        return 1, 0
    table = schedule.table(schedule.rank_of_stage[stage])
    kind = table[table[:, STAGE] == stage, KIND]
    change = np.array([[1, -1, -1, 0], [0, 0, 1, -1]])
    held, waiting = np.cumsum(change[:, kind], axis=1).max(axis=1, initial=0)
    return int(held), int(waiting)
