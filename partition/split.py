"""The exact split of a list of weights into consecutive parts: the largest as small as can be."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partition.errors import FewerLayersThanStages, OutOfMemory, PartitionError
from partition.split_chunks import Load, split_chunks
from partition.split_line import ROUNDING, reachable, split_line

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def split(
    weights: ArrayLike,
    parts: int,
    *,
    memory: ArrayLike | None = None,
    caps: float | Sequence[float] | None = None,
    rank_caps: float | Sequence[float] | None = None,
    stages_per_rank: int = 1,
    rank_of_part: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Cut layers into consecutive parts, none empty; part s is the layers cuts[s] to cuts[s + 1] - 1.

    weights: (layers,), finite and not negative, in any unit. Returns parts + 1 cuts, the first 0, the last
    len(weights).

    The result has the smallest bottleneck, the largest sum of a rank; among those the most even rank sums,
    that is the least sum of squares; then, where a rank carries several parts, the most even parts; ties go
    to earlier cuts. With one part a rank it is exact, otherwise as far as ``split_chunks`` says. Sums that
    differ by less than 1e-12 of them are equal. If all weights are 0, layers are counted.

    rank_of_part: (parts,), the rank that carries each part; part s is on rank s % (parts / stages_per_rank)
    unless given. speeds: (ranks,), all alike unless given; then every sum counts divided by the speed of its
    rank. memory: (layers,), or (parts, layers) where a layer needs more in one part than in another,
    as it does when early ranks hold more micro-batches. caps: the most memory of a part; rank_caps: of the
    parts of a rank together; one number for all or one each, in the unit of ``memory``.

    Raises FewerLayersThanStages; OutOfMemory where nothing fits; PartitionError for other arguments.

    >>> split([3, 15, 7, 8, 6, 4, 2, 7], 5)
    (0, 1, 2, 4, 6, 8)
    """
    sums = prefix_sums(weights)
    layers = len(sums) - 1
    carriers = placed(parts, stages_per_rank, rank_of_part)
    if layers < parts:
        raise FewerLayersThanStages(layers, parts)
    held = None if memory is None else prefix_memory(memory, parts, layers)
    if (held is None) != (caps is None and rank_caps is None):
        raise PartitionError("memory and its caps go together: give memory, and caps or rank_caps, or none of them")
    part_caps = spread(caps, parts, "caps", "part")
    shared_caps = spread(rank_caps, max(carriers) + 1, "rank_caps", "rank")[list(carriers)]
    alone = len(set(carriers)) == parts
    paces = relative(speeds, max(carriers) + 1, set(carriers))
    if paces is not None:
        sums = finer(sums)
    if alone:
        part_caps = np.minimum(part_caps, shared_caps)
    starts = None if held is None or np.isinf(part_caps).all() else earliest(held, part_caps)
    if alone:
        cuts = split_line(sums, parts, starts, None if paces is None else paces[list(carriers)])
    else:
        shares = None if held is None else held / (shared_caps * (1 + ROUNDING))[:, None]
        cuts = split_chunks(Load(sums, np.array(carriers), starts, shares, paces))
    if cuts is None:
        raise OutOfMemory(refusal(held, part_caps, layers))
    return cuts


def prefix_sums(weights: ArrayLike) -> Ints:
    """Prefix sums of the weights as integers, small ones where the weights are multiples of one number."""
    given = np.asarray(weights, dtype=np.float64)
    if given.ndim != 1 or len(given) == 0:
        raise PartitionError(f"weights have the shape {given.shape}: give one number a layer, for one layer or more")
    bad = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(bad):
        raise PartitionError(f"the weight of layer {bad[0]} is {given[bad[0]]}: give a finite number, 0 or more")
    # Powers of two change no digit: first no sum can overflow, then all integers and their sum fit 53 bits.
    given = np.ldexp(given, -math.frexp(given.max())[1])
    whole = np.rint(np.ldexp(given, 52 - math.frexp(given.sum())[1])).astype(np.int64)
    if not whole.any():
        whole[:] = 1
    return np.concatenate(([0], np.cumsum(whole // np.gcd.reduce(whole))))


def relative(speeds: Sequence[float] | None, ranks: int, carrying: set[int]) -> Floats | None:
    """The speeds with 1 for the fastest of the ranks that carry anything; None where these are all alike."""
    if speeds is None:
        return None
    given = np.asarray(speeds, dtype=np.float64)
    if given.shape != (ranks,) or not (np.isfinite(given) & (given > 0)).all():
        raise PartitionError(f"speeds are {speeds}: give a positive number for each of {ranks} ranks")
    fastest = given[sorted(carrying)].max()
    return None if (given[sorted(carrying)] == fastest).all() else np.minimum(given / fastest, 1.0)


def finer(sums: Ints) -> Ints:
    """The sums times a power of two, as large as exact arithmetic takes: a bottleneck is a whole number, and must be
    as exact when it is divided by a speed."""
    return sums << max(0, 52 - int(sums[-1]).bit_length())


def placed(parts: int, stages_per_rank: int, rank_of_part: Sequence[int] | None) -> tuple[int, ...]:
    """The rank of every part."""
    if parts < 1 or stages_per_rank < 1 or parts % stages_per_rank:
        raise PartitionError(f"{parts} parts, {stages_per_rank} a rank: give a multiple of stages_per_rank, 1 or more")
    if rank_of_part is None:
        return tuple(part % (parts // stages_per_rank) for part in range(parts))
    if len(rank_of_part) != parts or min(rank_of_part) < 0:
        raise PartitionError(
            f"rank_of_part is {tuple(rank_of_part)}: give a rank, 0 or more, for each of {parts} parts"
        )
    return tuple(int(rank) for rank in rank_of_part)


def prefix_memory(memory: ArrayLike, parts: int, layers: int) -> Floats:
    """(parts, layers + 1): prefix sums of the layers' memory in every part."""
    given = np.asarray(memory, dtype=np.float64)
    if given.shape not in ((layers,), (parts, layers)) or not (np.isfinite(given) & (given >= 0)).all():
        raise PartitionError(
            f"memory has the shape {given.shape}: give finite numbers, 0 or more, in the shape ({layers},) "
            f"or ({parts}, {layers})"
        )
    sums = np.zeros((*given.shape[:-1], layers + 1))
    np.cumsum(given, axis=-1, out=sums[..., 1:])
    return np.broadcast_to(sums, (parts, layers + 1))


def spread(caps: float | Sequence[float] | None, count: int, name: str, unit: str) -> Floats:
    """One cap each, infinite where none is given."""
    given = np.asarray(np.inf if caps is None else caps, dtype=np.float64)
    if given.shape not in ((), (count,)) or not (given > 0).all():
        raise PartitionError(f"{name} is {caps}: give a positive number, or one for each of {count} {unit}s")
    return np.broadcast_to(given, (count,))


def earliest(held: Floats, caps: Floats) -> Ints:
    """(parts, layers + 1): the earliest begin of a part that ends at a cut and keeps within its cap."""
    return np.stack([np.searchsorted(sums, sums - cap * (1 + ROUNDING)) for sums, cap in zip(held, caps, strict=True)])


def refusal(held: Floats | None, caps: Floats, layers: int) -> str:
    """What to say when nothing fits: by what factor larger caps would do, where that is easily known."""
    message = f"no split of {layers} layers into {len(caps)} parts was found that fits the memory caps"
    remedy = "use more ranks, or keep fewer micro-batches in flight"
    if held is None or np.isinf(caps).all():
        return f"{message}; raise them, {remedy}"
    low, high = 0.0, float(held[:, -1].max() / caps.min())
    while high - low > 1e-3 * high:
        factor = (low + high) / 2
        low, high = (low, factor) if reachable(earliest(held, caps * factor)) else (factor, high)
    return f"{message}; make them {high:.3g} times as large, {remedy}"
