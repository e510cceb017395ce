"""The start of a step: items read where they are needed, and the agreement that opens it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.agreement import Call, Opening, open_step
from pipeline.batch import Item, read_items
from pipeline.errors import LinkError
from pipeline.exchange import ShapeTable
from pipeline.failures import explain_hang
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.module import rows as count_rows
from pipeline.recut import read_rows
from pipeline.shapes import Form, signature_of
from schedules import Schedule

__all__ = ["Intake", "take_in"]


@dataclass(frozen=True, slots=True)
class Intake:
    """What a rank has read, empty where it reads nothing; the forms of the inputs that enter the model here."""

    items: list[Item]
    signatures: dict[int, Form]
    opening: Opening


def take_in(
    source: Any,
    call: Call,
    *,
    mesh: Mesh,
    schedule: Schedule,
    module: PipelineModule,
    table: ShapeTable,
    limit: int,
    rows: int | None,
    steps: int,
) -> Intake:
    """Read up to ``limit`` items, or items of so many ``rows`` that are cut into ``limit`` micro-batches, on ranks that
    hold the first or last stage of a route, and agree on the step, which comes after ``steps`` updates.

    Collective.  Raises the iterator's own error on the rank where it is raised, after the others have been told.
    """
    routes = [schedule.routes[route] for route in schedule.route_of_micro_batch]
    enters = [i for i, route in enumerate(routes) if schedule.rank_of_stage[route[0]] == mesh.pipe_rank]
    leaves = [i for i, route in enumerate(routes) if schedule.rank_of_stage[route[-1]] == mesh.pipe_rank]
    items: list[Item] = []
    weights: dict[int, float] = {}
    signatures: dict[int, Form] = {}
    numbers: dict[int, int] = {}
    taken = 0
    error: Exception | None = None
    if enters or leaves:
        try:
            if rows is None:
                items = read_items(source, limit)
                taken = len(items)
            else:
                items, taken = read_rows(source, rows, limit)
            # Without a loss there is nothing to weigh, and often nothing to weigh it by.
            weights = {i: 1.0 if call is Call.FORWARD else _weight(module, items[i]) for i in leaves if i < len(items)}
            signatures = {i: signature_of(items[i].inputs) for i in enters if i < len(items)}
            numbers = dict(zip(signatures, table.number(list(signatures.values())), strict=True))
        except Exception as raised:
            error = raised
    try:
        opening = open_step(
            mesh,
            limit,
            count=len(items) if enters or leaves else None,
            weights=weights,
            signatures=numbers,
            call=call,
            error=error,
            steps=steps,
            taken=taken,
            iterator=_identity(source, mesh) if enters or leaves else 0,
        )
    except LinkError as broken:
        explain_hang(broken, mesh)
        raise
    finally:
        if error is not None:
            raise error
    return Intake(items, signatures, opening)


def _identity(source: Any, mesh: Mesh) -> int:
    """What tells two iterators apart where ranks are threads, and might have been given the same one; else 0."""
    return 0 if mesh.random_lock is None or isinstance(source, list | tuple) else id(source)


def _weight(module: PipelineModule, item: Item) -> float:
    if item.targets is None and module.loss_weight is count_rows:
        return count_rows(item.inputs)
    return float(module.loss_weight(item.targets))
