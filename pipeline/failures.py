"""What a failed step tells: the rank, layer and action that failed first, on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.errors import FormVaried, LinkError, RankDied, StepFailed
from pipeline.mesh import Mesh
from pipeline.step import Failure
from pipeline.watch import hang_report
from schedules import Instruction

__all__ = ["explain_hang", "raise_first"]

_DYING = 0.1  # seconds for a process whose connections are gone to be seen as dead


def raise_first(mesh: Mesh, failure: Failure | None) -> None:
    """Raise ``StepFailed`` for the failure that came first.  Collective over all ranks."""
    mine = None
    if failure is not None and failure.error is not None and not isinstance(failure.error, FormVaried):
        message = f"{type(failure.error).__name__}: {failure.error}"
        mine = (failure.time, mesh.rank, failure.layer, failure.action, message)
    known = [told for told in mesh.world.all_gather_object(mine) if told is not None]
    _, rank, layer, action, message = min(known, default=(0.0, mesh.rank, "", "the step", "stopped by another rank"))
    raise StepFailed(rank, layer, action, message) from (failure.error if failure and rank == mesh.rank else None)


def explain_hang(error: LinkError, mesh: Mesh, rows: Sequence[Sequence[Instruction]] = ()) -> None:
    """Add to an error of the link what every rank was doing; ``rows`` are those of the Program, where one runs."""
    if isinstance(error, RankDied):
        time.sleep(_DYING)
    error.add_note(hang_report(mesh.board, rows or [()] * mesh.pipe, mesh.rows()))
