"""The two agreements of a step: what all ranks must know before its first forward, and before its update."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.errors import DataError, EndOfData, StateError
from pipeline.links.tree import sum_over_ranks
from pipeline.mesh import Mesh

__all__ = ["Call", "Closing", "Opening", "Report", "Wishes", "close", "open_step"]

_READS_NOTHING = 0.0
_FAILED = -1.0
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Call(enum.IntEnum):
    """What a step is for: the method of the engine that every rank must have called."""

    TRAIN_BATCH = 0
    EVAL_BATCH = 1
    FORWARD = 2


@dataclass(frozen=True, slots=True)
class Opening:
    """What one pipeline knows when a step starts: its micro-batches, their shares of the step, their signatures."""

    items: int  # that were taken for them
    micro_batches: int
    shares: tuple[float, ...]
    signatures: tuple[int, ...]


def open_step(
    mesh: Mesh,
    limit: int,
    *,
    count: int | None,
    weights: Mapping[int, float],
    signatures: Mapping[int, int],
    call: Call,
    error: Exception | None,
    steps: int,
    taken: int = 0,
    iterator: int = 0,
) -> Opening:
    """Agree on the step over all ranks, in one sum.

    ``count`` is the number of micro-batches this rank has read, None where it reads none, and ``error`` what it met
    while it read them; ``weights`` and ``signatures`` are those of the micro-batches that leave, or enter, the model on
    this rank; ``steps`` are the updates that it has made, ``taken`` the items that it has read, and ``iterator`` is a
    number for what it reads from, 0 where no other rank can have the same one.  Every slot of the vector is written by
    one rank, so that sums are exact.

    Raises ``EndOfData`` when an iterator has nothing left, ``StateError`` when ranks have made different numbers of
    updates, and ``DataError`` when a rank could not read, ranks read different numbers of micro-batches, call
    different methods, or the weights are no weights; on every rank alike, before anything is sent.
    """
    ranks = torch.zeros(mesh.size, 5, dtype=torch.float64)
    numbers = torch.zeros(2, mesh.data, limit, dtype=torch.float64)
    found = _FAILED if error is not None else _READS_NOTHING if count is None else 1.0 + count
    told = (float(call), found, float(steps), float(iterator), float(taken))
    ranks[mesh.rank] = torch.tensor(told, dtype=torch.float64)
    rows = [[float(values.get(i, 0)) for i in range(limit)] for values in (weights, signatures)]
    numbers[:, mesh.data_rank] = torch.tensor(rows, dtype=torch.float64)
    vector = torch.cat([ranks.reshape(-1), numbers.reshape(-1)])
    sum_over_ranks(mesh.link, vector)  # in host memory, where it is read
    calls, counts, updates, iterators, items = vector[: ranks.numel()].view_as(ranks).t().tolist()
    _require_one_call([Call(int(c)) for c in calls])
    _require_one_state(updates)
    _require_own_iterators(mesh, iterators)
    if _FAILED in counts:
        _tell_errors(mesh, error)
    micro_batches = _agreed_count(mesh, counts)
    weight, signature = vector[ranks.numel() :].view_as(numbers).tolist()
    weights_of_all = [w for row in weight for w in row]
    total = math.fsum(weights_of_all)
    if not (total > 0 and math.isfinite(total) and min(weights_of_all) >= 0):
        raise DataError(
            f"the loss weights of the step's micro-batches are {weights_of_all}; loss_weight must give finite numbers, "
            "none below 0 and not all 0"
        )
    own = mesh.data_rank
    return Opening(
        max(int(items[mesh.world_rank(own, place)]) for place in range(mesh.pipe)),
        micro_batches,
        tuple(w / total for w in weight[own][:micro_batches]),
        tuple(int(s) for s in signature[own][:micro_batches]),
    )


def _require_one_call(calls: Sequence[Call]) -> None:
    if len(set(calls)) > 1:
        shown = "; ".join(f"rank {rank} calls {call.name.lower()}" for rank, call in enumerate(calls))
        raise DataError(
            f"ranks do different things: {shown}. These are collective: every rank must make the same calls"
        )


def _require_one_state(updates: Sequence[float]) -> None:
    if len(set(updates)) > 1:
        shown = "; ".join(f"rank {rank} has made {int(number)}" for rank, number in enumerate(updates))
        raise StateError(
            f"ranks have made different numbers of updates: {shown}. An optimizer, a learning-rate scheduler or the "
            "loading of a checkpoint raised on some of them: load a checkpoint on every rank to go on"
        )


def _require_own_iterators(mesh: Mesh, iterators: Sequence[float]) -> None:
    reader: dict[tuple[int, float], int] = {}
    for rank, iterator in enumerate(iterators):
        first = reader.setdefault((mesh.coordinates(rank)[0], iterator), rank)
        if iterator and first != rank:
            raise DataError(
                f"ranks {first} and {rank} of one pipeline read the same iterator, so that each gets what the other "
                "does not; make one on every rank, inside of the worker, that yields the same items"
            )


def _tell_errors(mesh: Mesh, error: Exception | None) -> None:
    """Raise for what some ranks met while they read, on every rank alike.  Collective over all ranks."""
    told = mesh.world.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    shown = "; ".join(f"rank {rank} could not read its micro-batches: {text}" for rank, text in enumerate(told) if text)
    raise DataError(shown)


def _agreed_count(mesh: Mesh, counts: Sequence[float]) -> int:
    reading = {rank: int(count) - 1 for rank, count in enumerate(counts) if count > 0}
    copies = [{n for rank, n in reading.items() if mesh.coordinates(rank)[0] == copy} for copy in range(mesh.data)]
    if all(len(found) == 1 for found in copies):
        if {0} in copies:
            raise EndOfData("an iterator has no micro-batch left")
        if all(found == copies[0] for found in copies):
            return copies[0].pop()
    shown = ", ".join(f"rank {rank}: {count}" for rank, count in reading.items())
    raise DataError(
        f"ranks read different numbers of micro-batches ({shown}); iterators of one pipeline must yield the same "
        "items, and those of data-parallel ranks equally many"
    )


class Wishes(NamedTuple):
    """What some rank wants to happen when the step has ended, and all then do."""

    stop: bool
    save: bool


class Report(NamedTuple):
    """What a rank tells of its part of a step; numbers all, since they travel in one vector."""

    failed: bool  # a layer raised here
    varied: int  # 1 + the stage whose input was found not to have the agreed form; 0: none was
    rooted: bool  # a gradient starts at some loss here
    stop: bool
    save: bool
    busy: float  # seconds spent computing
    span: float  # seconds that the program took


@dataclass(frozen=True, slots=True)
class Closing:
    """What every rank knows before it updates: who failed, the loss, the gradients' norms, how busy each rank was."""

    failed: tuple[int, ...]  # world ranks on which a layer raised
    varied: frozenset[int]  # stages whose input did not have the agreed form
    rooted: bool  # whether a gradient starts anywhere
    stop: bool  # whether some rank asked to stop
    save: bool  # whether some rank asked for a checkpoint
    loss: Tensor
    nonfinite_loss: int | None  # the first micro-batch, counted over all pipelines, whose loss is no finite number
    squared_norms: tuple[float, ...]  # one a layer, tied parameters in their first
    busy: tuple[float, ...]  # seconds, one a world rank
    span: float  # seconds that the slowest rank's program took

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients together: squares added in layer order on every rank."""
        return math.sqrt(sum(self.squared_norms)) if all(map(math.isfinite, self.squared_norms)) else math.inf


def close(
    mesh: Mesh,
    limit: int,
    report: Report,
    *,
    losses: Mapping[int, Tensor],
    shares: Sequence[float],
    squared_norms: Sequence[Tensor | float],
    sharded: bool,
) -> Closing:
    """Agree on the end of a step over all ranks, in one sum.

    ``losses`` are those of the micro-batches that left the model on this rank; ``squared_norms`` has one number a
    layer, 0 for the layers that another rank counts.  ``sharded``: each copy of the pipeline counts its part of them.
    """
    code = max((1 + _DTYPES.index(loss.dtype) for loss in losses.values() if loss.dtype in _DTYPES), default=0)
    row = [float(code), *map(float, report)]
    ranks = torch.zeros(mesh.size, len(row), dtype=torch.float64)
    ranks[mesh.rank] = torch.tensor(row, dtype=torch.float64)
    terms = torch.zeros(mesh.data, limit, dtype=torch.float64)
    # Where the share is 0 the loss may be the mean over no samples, which is not a number.
    counted = [micro_batch for micro_batch in losses if shares[micro_batch]]
    if counted:
        found = torch.stack([losses[i].double() for i in counted]).cpu()
        shares_of = torch.tensor([shares[i] for i in counted], dtype=torch.float64)
        terms[mesh.data_rank, torch.tensor(counted)] = found * shares_of
    copies = mesh.data if sharded else 1
    norms = torch.zeros(copies, len(squared_norms), dtype=torch.float64)
    here = [(layer, norm) for layer, norm in enumerate(squared_norms) if isinstance(norm, Tensor)]
    if here:  # one transfer for all of them
        together = torch.stack([norm for _, norm in here]).cpu()
        norms[mesh.data_rank if sharded else 0, torch.tensor([layer for layer, _ in here])] = together
    vector = torch.cat([ranks.reshape(-1), terms.reshape(-1), norms.reshape(-1)])
    sum_over_ranks(mesh.link, vector)  # in host memory, where it is read
    ranks, terms, norms = vector.split([ranks.numel(), terms.numel(), norms.numel()])
    codes, failed, varied, rooted, stop, save, busy, span = ranks.view(mesh.size, len(row)).t().tolist()
    losses_of_all = terms.reshape(-1).tolist()
    loss = torch.tensor(_summed(losses_of_all), dtype=torch.float64)
    code = int(max(codes))
    return Closing(
        failed=tuple(rank for rank, told in enumerate(failed) if told),
        varied=frozenset(int(told) - 1 for told in varied if told),
        rooted=any(rooted),
        stop=any(stop),
        save=any(save),
        loss=loss.to(device=mesh.device, dtype=_DTYPES[code - 1] if code else torch.float32),
        nonfinite_loss=next((i for i, term in enumerate(losses_of_all) if not math.isfinite(term)), None),
        squared_norms=tuple(map(_summed, zip(*norms.view(copies, -1).tolist(), strict=True))),
        busy=tuple(busy),
        span=max(span),
    )


def _summed(terms: Sequence[float]) -> float:
    """A plain sum in micro-batch order: the same rounding on every rank and in every layout."""
    total = 0.0
    for term in terms:
        total += term
    return total
