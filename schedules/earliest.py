"""When everything can run: the longest path through rows whose nodes run in order and wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.errors import DeadlockError


class Times(NamedTuple):
    """Start and end of every node."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]


def earliest(
    row_starts: NDArray[np.intp],
    inputs: NDArray[np.intp],
    delay: NDArray[np.float64],
    duration: NDArray[np.float64],
    describe: Callable[[int], str],
) -> Times:
    """Start every node as soon as the node before it in its row and all its inputs allow.

    Nodes are numbered row after row; ``row_starts`` has one number a row and the number of nodes at the end.
    ``inputs`` and ``delay`` have shape (inputs per node, nodes): node n waits for the end of ``inputs[k, n]``
    plus ``delay[k, n]``; the number of nodes stands for "no input". ``describe`` names a node in messages.

    All rows advance together, one node each per round, so the work outside numpy grows with the longest chain
    of nodes and not with their number. Raises DeadlockError, with the circle, when no row can advance.
    """
    count = len(duration)
    start = np.empty(count)
    end = np.full(count + 1, np.inf)  # infinite: not yet known
    end[count] = 0.0
    head, limit = row_starts[:-1].copy(), row_starts[1:]
    free = np.zeros(len(head))
    rows = np.flatnonzero(head < limit)
    while rows.size:
        nodes = head[rows]
        ready = free[rows]
        for source, after in zip(inputs, delay, strict=True):
            ready = np.maximum(ready, end[source[nodes]] + after[nodes])
        known = ready < np.inf
        if not known.all():
            advancing = rows[known]
            if not advancing.size:
                raise DeadlockError(_circle(head, limit, row_starts, inputs, end, describe))
            nodes, ready = nodes[known], ready[known]
        else:
            advancing = rows
        start[nodes] = ready
        end[nodes] = free[advancing] = ready + duration[nodes]
        head[advancing] = nodes + 1
        rows = rows[head[rows] < limit[rows]]
    return Times(start, end[:-1])


def _circle(
    head: NDArray[np.intp],
    limit: NDArray[np.intp],
    row_starts: NDArray[np.intp],
    inputs: NDArray[np.intp],
    end: NDArray[np.float64],
    describe: Callable[[int], str],
) -> str:
    """Follow who waits for whom from any row that is stuck until a row comes up again."""
    row = int(np.flatnonzero(head < limit)[0])
    waits: dict[int, str] = {}
    while row not in waits:
        node = int(head[row])
        missing = next(int(source[node]) for source in inputs if end[source[node]] == np.inf)
        waits[row] = f"{describe(node)} waits for {describe(missing)}"
        row = int(np.searchsorted(row_starts, missing, side="right")) - 1
        if missing > head[row]:
            waits_behind = f", which comes after {describe(int(head[row]))}"
            waits[list(waits)[-1]] += waits_behind
    circle = list(waits.values())[list(waits).index(row) :]
    return "these wait for each other, so none of them can ever run:\n  " + "\n  ".join(circle)
