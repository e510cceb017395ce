"""The way of each exchange between data-parallel ranks: over all of them at once, or by nodes, and how compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.comm.behind import AT_ONCE, Behind, behind
from pipeline.comm.compress import Bf16, Compressor, Method, PowerSGD, Shapes, TopK
from pipeline.comm.hierarchical import HierarchicalExchange
from pipeline.config import PipelineConfig
from pipeline.device import synchronise
from pipeline.errors import ConfigError
from pipeline.links.protocol import Collective, Exchange, Group
from pipeline.mesh import Mesh

__all__ = ["Ways", "ways_of"]

_SUBJECTS = ("gradients", "parameters", "states")
_HOW = ("comm_compress", "comm_rank", "comm_share", "comm_error_feedback", "comm_exact_steps")
_SETTINGS = (*(f"comm_{name}" for name in _SUBJECTS), *_HOW)
_ELEMENTS = (1 << 12, 1 << 18)  # of fp32, in the messages that are timed: 16 KiB and 1 MiB
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Ways:
    """How this rank exchanges gradients, parameters, and the states of layers with its replicas; ``reasons`` say why,
    where there was something to choose."""

    gradients: Exchange
    parameters: Exchange
    states: Exchange
    reasons: tuple[str, ...]
    chosen_by: tuple[object, ...]
    """Equal where the same would be chosen again."""
    _lines: Mapping[str, Sequence[_Line]]
    _compressed: _Compressed | None

    def seconds(self, subject: str, size: int) -> float:
        """What a vector of so many bytes takes, as measured: of gradients to be summed, or parameters to be gathered;
        0 for what was not measured."""
        lines = self._lines.get(subject, ())
        return min((line.latency + line.per_byte * size for line in lines), default=0.0) if size else 0.0

    def compressor(self, gradients: Tensor, shapes: Shapes) -> Compressor | None:
        """What sums these gradients, of parameters of these shapes; None where they are summed as they are."""
        return None if self._compressed is None or not gradients.numel() else self._compressed.one(gradients, shapes)


class _Compressed(NamedTuple):
    """How gradients are compressed, and the exchange that is then used, by nobody else."""

    config: PipelineConfig
    exchange: Exchange
    behind: Behind

    def one(self, gradients: Tensor, shapes: Shapes) -> Compressor:
        config = self.config
        methods: dict[str, Callable[[], Method]] = {
            "bf16": Bf16,
            "topk": partial(TopK, config.comm_share),
            "powersgd": partial(PowerSGD, config.comm_rank, shapes),
        }
        method = methods[config.comm_compress]()
        feedback, exact = config.comm_error_feedback, config.comm_exact_steps
        return Compressor(method, gradients, self.exchange, self.behind, feedback=feedback, exact=exact)


def ways_of(config: PipelineConfig, mesh: Mesh, before: Ways | None = None, *, timed: bool = False) -> Ways:
    """The ways that the settings ask for, ``timed`` so that a step can be predicted.  Collective over all ranks, which
    choose the same.

    ``before`` are those that there were; they stay if nothing that they depend on has changed.  Raises ``ConfigError``
    where ranks are to exchange by nodes that hold unequal numbers of them.
    """
    chosen_by = (id(mesh.replicas), *(getattr(config, name) for name in _SETTINGS))
    if before is not None and before.chosen_by == chosen_by:
        return before
    aside = behind(mesh.device, threads=mesh.random_lock is not None)
    wanted = {subject: getattr(config, f"comm_{subject}") for subject in _SUBJECTS}
    columns = _by_nodes(mesh, required="hierarchical" in wanted.values())
    found: dict[str, Exchange] = dict.fromkeys(_SUBJECTS, mesh.replicas)
    reasons: list[str] = []
    lines: dict[str, list[_Line]] = {}
    if columns is not None and set(wanted.values()) != {"flat"}:
        inner, outer = _groups(mesh, columns, "")
        layered = HierarchicalExchange(mesh.replicas, inner, outer, aside)
        for subject, way in wanted.items():
            if way == "hierarchical":
                found[subject] = layered
            elif way == "auto":
                lines[subject] = [_line(subject, one, mesh) for one in (mesh.replicas, layered)]
                found[subject], reason = _faster(subject, mesh.replicas, layered, *lines[subject])
                reasons.append(reason)
    if timed and mesh.data > 1:
        for subject in ("gradients", "parameters"):
            if subject not in lines:
                lines[subject] = [_line(subject, found[subject], mesh)]
    compressed = None
    if config.comm_compress != "none" and mesh.data > 1:
        exchange: Exchange
        if columns is not None and found["gradients"] is not mesh.replicas:
            # Of what is left after compression, two exchanges more cost less than the bytes between nodes.
            exchange = HierarchicalExchange(mesh.replicas, *_groups(mesh, columns, "compressed "), AT_ONCE)
        else:
            exchange = mesh.split(mesh.columns(), "compressed")
        compressed = _Compressed(config, exchange, aside)
    return Ways(found["gradients"], found["parameters"], found["states"], tuple(reasons), chosen_by, lines, compressed)


# -- by nodes ------------------------------------------------------------------------------------------------

_Columns = list[list[list[int]]]
"""For each pipeline rank the ranks that hold its stages, node by node."""


def _by_nodes(mesh: Mesh, *, required: bool) -> _Columns | None:
    """None where no exchange can be split: all replicas are on one node, or each is on a node of its own."""
    columns = [[list(part) for _, part in groupby(column, mesh.nodes.__getitem__)] for column in mesh.columns()]
    if all(len(column) == 1 for column in columns) or all(len(column) == mesh.data for column in columns):
        return None
    sizes = sorted({len(part) for column in columns for part in column})
    if len(sizes) == 1 and len({len(column) for column in columns}) == 1:
        return columns
    if required:
        raise ConfigError(
            "a hierarchical exchange needs as many data-parallel ranks of a stage on each node, not "
            f"{' and '.join(map(str, sizes))}"
            '; set comm_gradients, comm_parameters and comm_states to "flat", or choose other ranks_per_node, '
            "mesh_inside or data_parallel"
        )
    return None


def _groups(mesh: Mesh, columns: _Columns, use: str) -> tuple[Group, Group]:
    inner = mesh.split([part for column in columns for part in column], f"{use}inside nodes")
    places = [list(place) for column in columns for place in zip(*column, strict=True)]
    return inner, mesh.split(places, f"{use}between nodes")


# -- which is faster -----------------------------------------------------------------------------------------


class _BySize:
    """An Exchange that takes one way for messages of fewer than ``size`` bytes, and another from there on."""

    __slots__ = ("_large", "_size", "_small", "rank", "ranks")

    def __init__(self, small: Exchange, large: Exchange, size: float) -> None:
        self.ranks, self.rank = small.ranks, small.rank
        self._small, self._large, self._size = small, large, size

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Collective:
        return self._for(tensor).all_reduce(tensor, async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        return self._for(input).reduce_scatter(output, input, async_op)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool = False) -> Collective:
        return self._for(output).all_gather_into(output, input, async_op)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._for(tensor).broadcast(tensor, source)

    def _for(self, whole: Tensor) -> Exchange:
        return self._small if whole.nbytes < self._size else self._large


class _Line(NamedTuple):
    """The time of a message: ``latency`` seconds, and ``per_byte`` for each byte."""

    latency: float
    per_byte: float

    def __str__(self) -> str:
        return f"{1e3 * self.latency:.2g} ms + {1e3 * 2**20 * self.per_byte:.3g} ms/MiB"


def _faster(
    subject: str, flat: Exchange, layered: Exchange, direct: _Line, nodes: _Line
) -> tuple[Exchange, str]:
    """The way that takes less time for each size of message, by what both were measured to take; and why."""
    about = f"flat {direct}, by nodes {nodes}"
    if nodes.per_byte >= direct.per_byte:
        return flat, f"{subject}: flat ({about})"
    size = max(0.0, (nodes.latency - direct.latency) / (direct.per_byte - nodes.per_byte))
    return _BySize(flat, layered, size), f"{subject}: by nodes from {size / 1024:,.0f} KiB on ({about})"


def _line(subject: str, exchange: Exchange, mesh: Mesh) -> _Line:
    few, many = (_seconds(subject, exchange, elements, mesh) for elements in _ELEMENTS)
    per_byte = max(0.0, many - few) / (4 * (_ELEMENTS[1] - _ELEMENTS[0]))
    return _Line(max(0.0, few - 4 * _ELEMENTS[0] * per_byte), per_byte)


def _seconds(subject: str, exchange: Exchange, elements: int, mesh: Mesh) -> float:
    """The least of some runs, on the rank on which it takes longest.  Collective over all ranks."""
    members = len(exchange.ranks)
    part = torch.zeros(-(-elements // members), device=mesh.device)
    whole = torch.zeros(part.numel() * members, device=mesh.device)
    calls: dict[str, Callable[[], object]] = {
        "gradients": partial(exchange.all_reduce, whole),
        "parameters": partial(exchange.all_gather_into, whole, part),
        "states": partial(exchange.broadcast, whole, 0),
    }
    took: list[float] = []
    for _ in range(_RUNS):
        mesh.world.barrier()
        synchronise(mesh.device)
        started = time.perf_counter()
        calls[subject]()
        synchronise(mesh.device)
        took.append(time.perf_counter() - started)
    slowest: float = max(min(others) for others in mesh.world.all_gather_object(took))
    return slowest
