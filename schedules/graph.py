"""The dependency graph of a schedule, for whatever networkx can answer: circles, longest paths,
reachability."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from schedules.action import Entry

if TYPE_CHECKING:
    import networkx

    from schedules.schedule import Schedule


def graph(schedule: Schedule) -> networkx.DiGraph[Entry]:
    """A node an entry, with its ``rank`` and its ``place`` in the row; an edge to each entry that waits for
    it.

    ``kind`` of an edge: "message" between ranks, "need" inside a rank, "row" where only the order of the row
    makes an entry wait for the one before it.
    """
    import networkx

    made: networkx.DiGraph[Entry] = networkx.DiGraph(name=schedule.name)
    for rank, row in enumerate(schedule.rows):
        made.add_nodes_from((entry, {"rank": rank, "place": place}) for place, entry in enumerate(row))
        made.add_edges_from(itertools.pairwise(row), kind="row")
    nodes = [entry for row in schedule.rows for entry in row]
    entry_of, rank_of = schedule.entries.of_action, schedule.rank_of_action
    for need in schedule.needs:
        needing = np.flatnonzero(need >= 0)
        for later, earlier in zip(needing.tolist(), need[needing].tolist(), strict=True):
            kind = "need" if rank_of[earlier] == rank_of[later] else "message"
            made.add_edge(nodes[entry_of[earlier]], nodes[entry_of[later]], kind=kind)
    return made
