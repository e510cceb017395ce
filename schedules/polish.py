"""Polishing small schedules with a solver: OR-tools CP-SAT looks for shorter rows, and may prove that there are none.

One interval a pass; those of a rank do not overlap, passes of one kind on one stage come in order of micro-batches,
which loses nothing since micro-batches are alike, and what a rank holds never exceeds its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from schedules.critical import Network, Rows, times
from schedules.errors import MissingLibrary

TICKS = 200_000
"""The step time in whole numbers, which the solver counts in; times are rounded to that."""

SHARES = 25_200
"""What a rank's whole share of activations is in whole numbers; halves to tenths of it are exact."""

LIMIT = 2.0
"""How long the solver may take, in its own deterministic measure, roughly seconds."""


class Polished(NamedTuple):
    """What the solver found."""

    rows: Rows
    score: float
    bound: float
    """No rows are shorter than this, but for rounding."""
    proved: bool
    """Whether none are shorter than those found."""


def available() -> bool:
    """Whether the solver is installed."""
    from importlib.util import find_spec

    return find_spec("ortools") is not None


def polish(
    network: Network, rows: Rows, cap: Sequence[float], *, tick: float | None = None, limit: float = LIMIT
) -> Polished:
    """The shortest rows that the solver finds from ``rows`` on; the same on every day.

    ``tick`` is the time that all times are multiples of, where there is one. Raises MissingLibrary without OR-tools.
    """
    cp_model = solver()
    begin = times(network, rows)
    if begin is None:
        raise ValueError("rows that cannot run cannot be polished")
    tick = tick or max(begin.score, 1e-12) / TICKS
    model, starts = _model(cp_model, network, rows, cap, tick, begin.end, begin.score)
    run = cp_model.CpSolver()
    run.parameters.num_workers = 1
    run.parameters.random_seed = 0
    run.parameters.max_deterministic_time = limit
    status = run.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Polished(rows, begin.score, 0.0, proved=False)
    changed = [sorted(row, key=lambda number: (run.value(starts[number]), number)) for row in rows]
    found = times(network, changed)
    bound = run.best_objective_bound * tick
    if found is None or found.score > begin.score:
        changed, found = rows, begin
    return Polished(changed, found.score, bound, status == cp_model.OPTIMAL)


def _model(
    cp_model: ModuleType,
    network: Network,
    rows: Rows,
    cap: Sequence[float],
    tick: float,
    end: Sequence[float],
    score: float,
) -> tuple[Any, list[Any]]:
    """The model, and the start of each pass in it."""
    model = cp_model.CpModel()
    length = [round(seconds / tick) for seconds in network.seconds]
    delay = [round(seconds / tick) for seconds in network.delay]
    lead = [round(seconds / tick) for seconds in network.lead]
    horizon = round(score / tick) + sum(1 for _ in length)  # rounding up may add a tick a pass
    starts = [model.new_int_var(0, horizon, f"s{number}") for number in range(len(length))]
    step = model.new_int_var(0, horizon, "step")
    for number, source in enumerate(network.sender):
        if source >= 0:
            model.add(starts[number] >= starts[source] + length[source] + delay[number])
        for before in network.before[number]:
            model.add(starts[number] >= starts[before] + length[before])
        model.add_hint(starts[number], round((end[number] - network.seconds[number]) / tick))
    for rank, row in enumerate(rows):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[number], length[number], f"i{number}") for number in row
        )
        for number in row:
            model.add(step >= starts[number] + length[number] + lead[rank])
        model.add(step >= sum(length[number] for number in row) + lead[rank])
        _add_memory(model, network, row, cap[rank], starts, length)
    model.minimize(step)
    return model, starts


def _add_memory(
    model: Any, network: Network, row: Sequence[int], cap: float, starts: Sequence[Any], length: Sequence[int]
) -> None:
    """What is taken counts from the start of a pass, what is freed from its end."""
    unit = SHARES / max(1e-12, max(abs(network.change[number]) for number in row)) if row else 1.0
    when, change = [], []
    for number in row:
        amount = round(network.change[number] * unit)
        if amount:
            when.append(starts[number] if amount > 0 else starts[number] + length[number])
            change.append(amount)
    if when:
        model.add_reservoir_constraint(when, change, 0, round(cap * unit + 1e-6))


def solver() -> ModuleType:
    """OR-tools' CP-SAT. Raises MissingLibrary."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingLibrary("polish=True needs OR-tools; install pipeloom[search], or set polish to False") from error
    found: ModuleType = cp_model
    return found
