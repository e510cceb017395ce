"""Which layers to recompute so that every rank keeps within its memory, at the least cost in time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition.costs import LayerCost, Profile
from partition.errors import OutOfMemory
from partition.memory import StateBytes, predict_memory
from partition.partition import Partition
from partition.predict import predict_timeline
from schedules import Schedule
from schedules.table import KIND, STAGE, B, F, I

Floats = NDArray[np.float64]

MOST_NODES = 1_000
"""Nodes of the search for one rank; what it has found until then is at least as good as the greedy choice."""
MOST_ROUNDS = 6


def recomputed(profile: Profile, layers: Collection[int]) -> Profile:
    """The profile with these layers recomputed: they keep only their input, and run forward once more in I."""
    costs = profile.layers
    changed = [_cost(costs, index) if index in layers else cost for index, cost in enumerate(costs)]
    return profile.model_copy(update={"layers": tuple(changed)})


def _cost(costs: Sequence[LayerCost], index: int) -> LayerCost:
    cost = costs[index]
    return cost.model_copy(
        update={"input_grad": cost.input_grad + cost.forward, "activation_bytes": _input_bytes(costs, index)}
    )


def _input_bytes(costs: Sequence[LayerCost], index: int) -> int:
    """What a layer keeps when it is recomputed; the first layer's input nobody has measured: what it keeps anyway."""
    own = costs[index].activation_bytes
    return min(own, costs[index - 1].output_bytes) if index else own


def choose_recomputed(
    profile: Profile, partition: Partition, schedule: Schedule, limit: float, state: StateBytes | None = None
) -> tuple[int, ...]:
    """The layers to recompute, of each rank those that add the least time to a micro-batch and let it keep within
    ``limit`` bytes.

    Ranks do not depend on each other, and a rank of more than one stage weighs all of them together.  ``profile`` is
    without recomputation.  Raises OutOfMemory where a rank needs more even with all of its layers recomputed.
    """
    everything = range(len(profile.layers))
    now = predict_memory(profile, partition, schedule, state)
    least = predict_memory(recomputed(profile, everything), partition, schedule, state)
    chosen: set[int] = set()
    for rank in range(schedule.ranks):
        if least[rank].total > limit:
            raise OutOfMemory(
                f"rank {rank} needs {least[rank].total:.0f} bytes even with all of its layers recomputed, of which "
                f"{least[rank].activations:.0f} are activations, and memory_limit is {limit:.0f}; raise memory_limit, "
                "use more ranks or a higher zero, or a schedule that keeps fewer micro-batches alive"
            )
        if now[rank].total > limit:
            room = limit - (now[rank].total - now[rank].activations)
            chosen |= _of_rank(profile, partition, schedule, rank, room)
    return tuple(sorted(chosen))


def choose_cuts_and_recomputed(
    profile: Profile, schedule: Schedule, cut: Callable[[Profile], Partition], limit: float, state: StateBytes
) -> tuple[Partition, tuple[int, ...]]:
    """Cuts and layers to recompute, each chosen for the other until nothing changes; the shortest simulated step wins.

    Raises OutOfMemory where no cuts that are tried let every rank keep within ``limit`` bytes.
    """
    found: list[tuple[float, int, Partition, tuple[int, ...]]] = []
    refused: list[OutOfMemory] = []
    for begun in (profile, recomputed(profile, range(len(profile.layers)))):
        costs, seen = begun, set()
        for _ in range(MOST_ROUNDS):
            partition = cut(costs)
            try:
                layers = choose_recomputed(profile, partition, schedule, limit, state)
            except OutOfMemory as error:
                refused.append(error)
                break
            if (partition.cuts, layers) in seen:
                break
            seen.add((partition.cuts, layers))
            costs = recomputed(profile, layers)
            step = predict_timeline(costs, partition, schedule).step_time
            found.append((step, len(found), partition, layers))
    if not found:
        raise refused[-1]
    _, _, partition, layers = min(found, key=lambda entry: entry[:2])
    return partition, layers


# -- one rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """Layers that may be recomputed, cheapest for what they free first: seconds, and bytes freed at each moment at
    which the rank keeps too much."""

    layers: tuple[int, ...]
    seconds: Floats
    freed: Floats  # (layers, moments)
    needed: Floats  # (moments,)


def _of_rank(profile: Profile, partition: Partition, schedule: Schedule, rank: int, room: float) -> set[int]:
    choice = _choice(profile, partition, schedule, rank, room)
    best = _pruned(choice, range(len(choice.layers)))
    return {choice.layers[i] for i in _searched(choice, best)}


def _choice(profile: Profile, partition: Partition, schedule: Schedule, rank: int, room: float) -> _Choice:
    costs = profile.layers
    own = schedule.stages_of_rank(rank)
    layers_of = [list(partition.layers_of(schedule.layer_group_of_stage[stage])) for stage in own]
    alive, queued = _moments(schedule, rank, own)
    kept = np.array([sum(costs[layer].activation_bytes for layer in layers) for layers in layers_of], dtype=float)
    waiting = np.array([sum(costs[layer].weight_grad_bytes for layer in layers) for layers in layers_of], dtype=float)
    over = alive @ kept + queued @ waiting - room
    alive, over = alive[over > 0], over[over > 0]
    which, seconds, freed = [], [], []
    for column, layers in enumerate(layers_of):
        for layer in layers:
            saved = costs[layer].activation_bytes - _input_bytes(costs, layer)
            if saved > 0:
                which.append(layer)
                seconds.append(costs[layer].forward)
                freed.append(saved * alive[:, column])
    dear = [t / max(float(f.max(initial=0.0)), 1.0) for t, f in zip(seconds, freed, strict=True)]
    order = np.argsort(dear, kind="stable")
    return _Choice(
        tuple(which[i] for i in order),
        np.array(seconds)[order],
        np.array(freed).reshape(len(which), len(over))[order],
        over,
    )


def _moments(schedule: Schedule, rank: int, own: Sequence[int]) -> tuple[Floats, Floats]:
    """(moments, stages): micro-batches between F and I, and between I and W, at moments that are not below another."""
    table = schedule.table(rank)
    kind, column = table[:, KIND], np.searchsorted(own, table[:, STAGE])
    alive, queued = np.zeros((2, len(table), len(own)))
    rows = np.arange(len(table))
    alive[rows, column] = np.where(kind == F, 1, np.where((kind == B) | (kind == I), -1, 0))
    queued[rows, column] = np.where(kind == I, 1, np.where((kind != F) & (kind != B), -1, 0))
    both = np.unique(np.hstack([alive.cumsum(axis=0), queued.cumsum(axis=0)]), axis=0)
    dominated = [(both >= row).all(axis=1).sum() > 1 for row in both]
    both = both[~np.array(dominated)]
    return both[:, : len(own)], both[:, len(own) :]


def _pruned(choice: _Choice, chosen: Collection[int]) -> list[int]:
    """As many of the chosen as are needed, the cheapest for what they free first; then the dearest left out again."""
    taken: list[int] = []
    left = choice.needed.copy()
    for i in chosen:
        if not (left > 0).any():
            break
        taken.append(i)
        left -= choice.freed[i]
    for i in sorted(taken, key=lambda i: -choice.seconds[i]):
        if (left + choice.freed[i] <= 0).all():
            taken.remove(i)
            left += choice.freed[i]
    return taken


def _searched(choice: _Choice, best: list[int]) -> list[int]:
    """The choice that takes the least time, by branch and bound; ``best`` is one to begin with."""
    least, nodes = float(choice.seconds[best].sum()), 0
    rest = np.vstack([np.cumsum(choice.freed[::-1], axis=0)[::-1], np.zeros(len(choice.needed))])
    stack: list[tuple[int, float, Floats, tuple[int, ...]]] = [(0, 0.0, choice.needed, ())]
    while stack and nodes < MOST_NODES:
        index, spent, left, taken = stack.pop()
        nodes += 1
        if not (left > 0).any():
            if spent < least * (1 - 1e-12):
                least, best = spent, list(taken)
            continue
        if (left > rest[index] * (1 + 1e-12)).any() or spent + _bound(choice, index, left) >= least * (1 - 1e-12):
            continue
        stack.append((index + 1, spent, left, taken))
        stack.append((index + 1, spent + float(choice.seconds[index]), left - choice.freed[index], (*taken, index)))
    return best


def _bound(choice: _Choice, index: int, left: Floats) -> float:
    """Seconds without which no choice from the layers that remain frees what is left, parts of layers allowed."""
    moment = int(left.argmax())
    freed, seconds = choice.freed[index:, moment], choice.seconds[index:]
    useful = freed > 0
    order = np.argsort(seconds[useful] / freed[useful], kind="stable")
    freed, seconds = freed[useful][order], seconds[useful][order]
    reached = np.cumsum(freed)
    whole = int(np.searchsorted(reached, left[moment]))
    if whole >= len(freed):
        return float(seconds.sum())
    before = float(reached[whole - 1]) if whole else 0.0
    return float(seconds[:whole].sum() + seconds[whole] * (left[moment] - before) / freed[whole])
