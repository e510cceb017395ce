"""Methods of cutting a layer list, chosen by name."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence

from partition.costs import Profile, check_layers
from partition.errors import PartitionError, ProfileError, UnknownMethod
from partition.memory import Limits, StateBytes, carriers, limits
from partition.partition import Partition
from partition.refine import quickest
from partition.split import split
from schedules import Schedule

METHODS = ("profile", "parameters", "uniform", "type:REGEX")


def make_partition(
    method: str | Sequence[int],
    schedule: Schedule,
    *,
    layers: int | None = None,
    types: Sequence[str] | None = None,
    parameters: Sequence[int] | None = None,
    profile: Profile | None = None,
    memory_cap: float | Sequence[float] | None = None,
    state: StateBytes | None = None,
) -> Partition:
    """Cut a layer list for a schedule: one part for each group of layers that it places.

    method:
        "profile"     the shortest step by measured times: the exact split by F + I + W and the speed of ranks,
                      then the simulator decides between cuts near it
        "parameters"  equal numbers of parameters a rank
        "uniform"     equal numbers of layers a rank
        "type:REGEX"  equal numbers a rank of layers in whose type the expression is found, whatever its case
        cut points    those between two parts, (3, 6), or all from 0 to the number of layers, (0, 3, 6, 9);
                      parts may be empty

    The layers are given by their number, or by types, parameters or a profile, one entry a layer. memory_cap:
    the most bytes of a rank, one number or one a rank, for all methods but cut points; needs a profile, and
    takes the bytes kept per parameter from ``state``.

    Raises FewerLayersThanStages, OutOfMemory, UnknownMethod, ProfileError, and PartitionError for the rest.
    """
    count = count_layers(layers, types, parameters, profile)
    if not isinstance(method, str):
        return explicit(method, count, schedule.num_layer_groups)
    if profile is not None:
        types = types or [layer.type for layer in profile.layers]
        parameters = parameters or [layer.parameters for layer in profile.layers]
    weights = weigh(method, schedule, count, types, parameters, profile)
    if memory_cap is None:
        caps = None
    elif profile is None:
        raise ProfileError(
            "memory_cap needs a profile, which knows what layers keep alive; measure one or leave it out"
        )
    else:
        caps = limits(profile, schedule, memory_cap, state)
    shared = carriers(schedule)
    if method != "profile" or profile is None:
        return Partition(cut(weights, shared, caps))
    speeds = carrier_speeds(profile, schedule)
    cuts = cut(weights, shared, caps, speeds)
    # Those that are best by rank, and those that are best by part: chunks may be very uneven in the first.
    even = split(weights, len(shared), speeds=[speeds[carrier] for carrier in shared])
    starts = [cuts, even] if caps is None or caps.fit(even) else [cuts]
    return Partition(quickest(profile, schedule, starts, caps.fit if caps else None))


def carrier_speeds(profile: Profile, schedule: Schedule) -> list[float]:
    """The speed of what ``carriers`` numbers: that of the slowest rank of those that are one carrier."""
    by_rank = profile.speeds_for(schedule.ranks) or (1.0,) * schedule.ranks
    shared = carriers(schedule)
    found = [math.inf] * (max(shared) + 1)
    for group, rank in zip(schedule.layer_group_of_stage, schedule.rank_of_stage, strict=True):
        found[shared[group]] = min(found[shared[group]], by_rank[rank])
    return found


def cut(
    weights: Sequence[float], shared: Sequence[int], caps: Limits | None, speeds: Sequence[float] | None = None
) -> tuple[int, ...]:
    """The exact split by rank, within the caps."""
    if caps is None:
        return split(weights, len(shared), rank_of_part=shared, speeds=speeds)
    return split(
        weights, len(shared), rank_of_part=shared, memory=caps.memory, rank_caps=caps.rank_caps, speeds=speeds
    )


def weigh(
    method: str,
    schedule: Schedule,
    count: int,
    types: Sequence[str] | None,
    parameters: Sequence[int] | None,
    profile: Profile | None,
) -> list[float]:
    """What each layer counts by this method."""
    if method == "uniform":
        return [1.0] * count
    if method == "profile":
        if profile is None:
            raise ProfileError(
                "partition = 'profile' needs measured costs: give a profile, or set partition to "
                "'parameters' or 'uniform'"
            )
        return [layer.forward if schedule.forward_only else layer.seconds for layer in profile.layers]
    if method == "parameters":
        if parameters is None:
            raise PartitionError("partition = 'parameters' needs the number of parameters of each layer, or a profile")
        return beside_count(parameters)
    if method.startswith("type:"):
        return beside_count(matches(method.removeprefix("type:"), types))
    close = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UnknownMethod(f"partition = {method!r}: {hint}give one of {', '.join(METHODS)}, or cut points")


def beside_count(weights: Sequence[int]) -> list[float]:
    """The weights, and far behind them the number of layers, which decides where weights are equal or 0."""
    return [float((len(weights) + 1) * int(weight) + 1) for weight in weights]


def matches(pattern: str, types: Sequence[str] | None) -> list[int]:
    """1 for every layer whose type the pattern is found in."""
    if types is None:
        raise PartitionError(f"partition = 'type:{pattern}' needs the type of each layer, or a profile")
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"partition = 'type:{pattern}': not a regular expression: {error}") from error
    found = [int(bool(pattern and expression.search(name))) for name in types]
    if not any(found):
        there = sorted(set(types))
        close = difflib.get_close_matches(pattern.lower(), [name.lower() for name in there], n=1)
        near = [name for name in there if name.lower() in close]
        hint = f"did you mean 'type:{near[0]}'? " if near else ""
        raise PartitionError(f"partition = 'type:{pattern}' matches no layer: {hint}the types are {', '.join(there)}")
    return found


def explicit(points: Sequence[int], count: int, parts: int) -> Partition:
    """The partition with these cut points, the ends given or not."""
    given = tuple(int(point) for point in points)
    cuts = (0, *given, count) if len(given) == parts - 1 else given
    if len(cuts) != parts + 1 or cuts[0] != 0 or cuts[-1] != count or list(cuts) != sorted(cuts):
        raise PartitionError(
            f"partition = {given}: for {parts} stages of {count} layers give {parts - 1} cut points from 0 to "
            f"{count} that never go down, or {parts + 1} of which the first is 0 and the last {count}"
        )
    return Partition(cuts)


def count_layers(
    layers: int | None,
    types: Sequence[str] | None,
    parameters: Sequence[int] | None,
    profile: Profile | None,
) -> int:
    """The one number of layers that everything given agrees on."""
    counts = {
        "layers": layers,
        "types": None if types is None else len(types),
        "parameters": None if parameters is None else len(parameters),
    }
    known = {name: number for name, number in counts.items() if number is not None}
    if profile is not None:
        if known:
            check_layers(profile, next(iter(known.values())))
        known["profile"] = len(profile.layers)
    if not known:
        raise PartitionError("nothing says how many layers there are: give layers, types, parameters or a profile")
    if len(set(known.values())) > 1:
        raise PartitionError(
            f"these disagree on the number of layers: {', '.join(f'{n} {c}' for n, c in known.items())}"
        )
    return next(iter(known.values()))
