"""The schedule: what each rank computes and in which order, as data that never changes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.action import Action, Entry
from schedules.errors import IllegalSchedule
from schedules.messages import senders
from schedules.needs import Needs, needs
from schedules.table import (
    JOINED,
    KIND,
    KINDS,
    MICRO_BATCH,
    STAGE,
    B,
    F,
    I,
    Row,
    Table,
    W,
    as_entries,
    as_table,
)

if TYPE_CHECKING:
    import networkx


class Entries(NamedTuple):
    """Numbering of the entries of all rows, rank after rank: a Pair's two actions are one entry."""

    of_action: NDArray[np.intp]
    """The entry of each action, shape (actions,)."""
    first_action: NDArray[np.intp]
    """The first action of each entry, shape (entries,)."""
    starts: NDArray[np.intp]
    """The first entry of each rank, and the number of entries at the end, shape (ranks + 1,)."""
    rank: NDArray[np.intp]
    """The rank of each entry, shape (entries,)."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """One row of entries a rank. There are no empty slots: when things happen is for a cost model to say.

    A schedule that keeps one copy of the weights has one route, through all stages in order. One that keeps
    two (DualPipe, Chimera) has two routes over stages of their own; stages that hold the same slice of the
    layers share a number in ``layer_group_of_stage``.

    Rows are integers inside (``actions``); ``rows`` makes objects of them when asked. Not slotted, because
    what is derived from the rows is computed once, on first use, and kept.
    """

    name: str
    ranks: int
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]
    route_of_micro_batch: tuple[int, ...]
    layer_group_of_stage: tuple[int, ...]
    actions: Table = field(repr=False)
    """All rows one after the other, shape (actions, 4); see ``schedules.table``."""
    row_starts: tuple[int, ...] = field(repr=False)
    """Where each row begins in ``actions``, and its length at the end: ranks + 1 numbers."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self.actions.setflags(write=False)

    @staticmethod
    def from_rows(
        name: str,
        rows: Iterable[Row],
        rank_of_stage: Sequence[int],
        *,
        routes: Sequence[Sequence[int]] | None = None,
        route_of_micro_batch: Sequence[int] | None = None,
        layer_group_of_stage: Sequence[int] | None = None,
        micro_batches: int | None = None,
    ) -> Schedule:
        """A schedule of rows given as actions or as tables, with one copy of the weights unless told
        otherwise.

        A micro-batch takes the route on whose stages it runs.

        Raises IllegalSchedule for numbers of stages, micro-batches or ranks that do not exist; ``check``
        looks at the rest.
        """
        tables = [as_table(row) for row in rows]
        actions = np.concatenate([*tables, np.zeros((0, 4), dtype=np.int32)])
        if micro_batches is None:
            micro_batches = int(actions[:, MICRO_BATCH].max(initial=-1)) + 1
        stages = range(len(rank_of_stage))
        routes = (tuple(stages),) if routes is None else tuple(tuple(map(int, route)) for route in routes)
        return Schedule(
            name=name,
            ranks=len(tables),
            micro_batches=micro_batches,
            rank_of_stage=tuple(map(int, rank_of_stage)),
            routes=routes,
            route_of_micro_batch=tuple(
                _routes_taken(actions, routes, micro_batches) if route_of_micro_batch is None else route_of_micro_batch
            ),
            layer_group_of_stage=tuple(stages if layer_group_of_stage is None else map(int, layer_group_of_stage)),
            actions=actions,
            row_starts=(0, *np.cumsum([len(table) for table in tables]).tolist()),
        )

    # What a reader wants to see.

    @cached_property
    def rows(self) -> tuple[tuple[Entry, ...], ...]:
        """One tuple of entries a rank, in the order in which the rank runs them."""
        return tuple(as_entries(self.table(rank)) for rank in range(self.ranks))

    @property
    def num_stages(self) -> int:
        """Stages of all ranks, copies included."""
        return len(self.rank_of_stage)

    @property
    def num_layer_groups(self) -> int:
        """Slices the layer list is cut into: one a stage, or one for both copies of a stage."""
        return max(self.layer_group_of_stage, default=-1) + 1

    @cached_property
    def copy_of_stage(self) -> tuple[int, ...]:
        """How many stages before each one hold the same slice of the layers: 0, or 1 for a twin."""
        groups = self.layer_group_of_stage
        return tuple(groups[:stage].count(group) for stage, group in enumerate(groups))

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages that one rank holds."""
        return max((len(self.stages_of_rank(rank)) for rank in range(self.ranks)), default=0)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank in increasing order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    @cached_property
    def forward_only(self) -> bool:
        """Whether no row has a backward."""
        return bool(np.all(self.actions[:, KIND] == F))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward runs as I and W."""
        return bool(np.any(self.actions[:, KIND] == I))

    @cached_property
    def ordered(self) -> bool:
        """Whether every stage runs its B or I, and its W, in increasing micro-batch order.

        The gradients of such a schedule are sums in the same order as those of one process: the same bits.
        """
        stage, kind, micro_batch = (self.actions[:, column] for column in (STAGE, KIND, MICRO_BATCH))
        return all(
            _increasing(stage[chosen], micro_batch[chosen])
            for chosen in ((kind == B) | (kind == I), (kind == B) | (kind == W))
        )

    # The route of a micro-batch.

    def first_stage(self, micro_batch: int) -> int:
        """The stage that reads the micro-batch's input."""
        return self.routes[self.route_of_micro_batch[micro_batch]][0]

    def last_stage(self, micro_batch: int) -> int:
        """The stage that computes the micro-batch's loss."""
        return self.routes[self.route_of_micro_batch[micro_batch]][-1]

    def next_stage(self, stage: int, micro_batch: int) -> int | None:
        """Where the stage's output goes; None after the last stage of the route."""
        return _or_none(self.neighbours[1][self.route_of_micro_batch[micro_batch], stage])

    def previous_stage(self, stage: int, micro_batch: int) -> int | None:
        """Where the stage's input comes from; None before the first stage of the route."""
        return _or_none(self.neighbours[0][self.route_of_micro_batch[micro_batch], stage])

    # The same in integers, for what goes over all actions at once.

    def table(self, rank: int) -> Table:
        """The row of a rank as a table: a view of ``actions``."""
        return self.actions[self.row_starts[rank] : self.row_starts[rank + 1]]

    @cached_property
    def entries(self) -> Entries:
        """The numbering of entries; with no Pair in the rows it is the numbering of actions."""
        opens = np.ones(len(self.actions), dtype=bool)
        opens[1:] = self.actions[:-1, JOINED] == 0
        of_action = np.cumsum(opens) - 1
        before = np.concatenate([[0], np.cumsum(opens)])
        starts = before[list(self.row_starts)]
        rank = np.repeat(np.arange(self.ranks), np.diff(starts))
        return Entries(of_action, np.flatnonzero(opens), starts, rank)

    @cached_property
    def rank_of_action(self) -> NDArray[np.intp]:
        """The rank that runs each action, shape (actions,)."""
        return np.repeat(np.arange(self.ranks), np.diff(self.row_starts))

    @cached_property
    def neighbours(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The previous and the next stage, each of shape (routes, stages), -1 where there is none."""
        previous = np.full((len(self.routes), self.num_stages), -1, dtype=np.intp)
        following = previous.copy()
        for number, route in enumerate(self.routes):
            previous[number, route[1:]] = route[:-1]
            following[number, route[:-1]] = route[1:]
        return previous, following

    @cached_property
    def needs(self) -> Needs:
        """What must have run before each action, as numbers of actions; see ``schedules.needs``."""
        return needs(self.actions, *self.neighbours, np.array(self.route_of_micro_batch, dtype=np.intp))

    @cached_property
    def senders(self) -> NDArray[np.intp]:
        """The entries of other ranks whose messages each entry needs, shape (messages per entry, entries).

        The number of entries stands for "no message". Needs on the same rank are met by the order of the row;
        raises IllegalSchedule where they are not.
        """
        return senders(self)

    def action(self, number: int | np.integer) -> Action:
        """The action with this number in ``actions``."""
        stage, kind, micro_batch, _ = self.actions[number].tolist()
        return Action(stage, KINDS[kind], micro_batch)

    def entry_text(self, entry: int) -> str:
        """The entry with this number: "5F3"."""
        first = int(self.entries.first_action[entry])
        return str(as_entries(self.actions[first : first + 1 + self.actions[first, JOINED]])[0])

    def describe(self, entry: int) -> str:
        """An entry for messages: "rank 2's 5F3"."""
        return f"rank {self.entries.rank[entry]}'s {self.entry_text(entry)}"

    # Elsewhere.

    def graph(self) -> networkx.DiGraph[Entry]:
        """The dependency graph, an edge from each entry to those that wait for it; see
        ``schedules.graph``."""
        from schedules.graph import graph

        return graph(self)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the compute-only form that torch and torchtitan read; see ``schedules.interchange``."""
        from schedules.interchange import to_csv

        to_csv(self, path)

    @staticmethod
    def from_csv(path: str | os.PathLike[str], *, name: str | None = None) -> Schedule:
        """Read and check what ``to_csv`` or torch wrote; placement and routes are read off the rows.

        The name is that of the file unless given. Raises UnreadableSchedule or IllegalSchedule.
        """
        from schedules.interchange import from_csv

        return from_csv(path, name=name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._identity() == other._identity() and np.array_equal(self.actions, other.actions)

    def __hash__(self) -> int:
        return hash((self._identity(), self.actions.tobytes()))

    def _identity(self) -> tuple[object, ...]:
        return (
            self.name,
            self.row_starts,
            self.rank_of_stage,
            self.routes,
            self.route_of_micro_batch,
            self.layer_group_of_stage,
        )

    def _check_numbers(self) -> None:
        """Refuse numbers that point nowhere, so that everything else may use them as indices."""
        limits = (
            ("stage", self.actions[:, STAGE], self.num_stages),
            ("micro-batch", self.actions[:, MICRO_BATCH], self.micro_batches),
            ("stage of a route", [stage for route in self.routes for stage in route], self.num_stages),
            ("route of a micro-batch", self.route_of_micro_batch, len(self.routes)),
            ("rank of a stage", self.rank_of_stage, self.ranks),
        )
        for what, numbers, limit in limits:
            values = np.asarray(numbers, dtype=np.intp)
            wrong = values[(values < 0) | (values >= limit)]
            if wrong.size:
                raise IllegalSchedule(f"{self.name}: {what} {wrong[0]} does not exist; there are {limit}")
        for what, given, wanted in (
            ("route_of_micro_batch", self.route_of_micro_batch, self.micro_batches),
            ("layer_group_of_stage", self.layer_group_of_stage, self.num_stages),
        ):
            if len(given) != wanted:
                raise IllegalSchedule(f"{self.name}: {what} has {len(given)} numbers, it must have {wanted}")


def _routes_taken(actions: Table, routes: tuple[tuple[int, ...], ...], micro_batches: int) -> tuple[int, ...]:
    taken = np.zeros(micro_batches, dtype=np.intp)
    for number, route in enumerate(routes[1:], start=1):
        taken[actions[np.isin(actions[:, STAGE], route), MICRO_BATCH]] = number
    return tuple(taken.tolist())


def _increasing(stage: NDArray[np.int32], micro_batch: NDArray[np.int32]) -> bool:
    by_stage = np.argsort(stage, kind="stable")
    stage, micro_batch = stage[by_stage], micro_batch[by_stage]
    return bool(np.all((np.diff(micro_batch) > 0) | (np.diff(stage) != 0)))


def _or_none(stage: np.integer) -> int | None:
    return None if stage < 0 else int(stage)
