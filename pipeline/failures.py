"""What a failed step tells: the rank, layer and action that failed first, on every rank."""

from __future__ import annotations

from pipeline.errors import FormVaried, LinkError, StepFailed
from pipeline.mesh import Mesh
from pipeline.step import Failure
from pipeline.watch import hang_report
from schedules import Program

__all__ = ["explain_hang", "raise_first"]


def raise_first(mesh: Mesh, failure: Failure | None) -> None:
    """Raise ``StepFailed`` for the failure that came first.  Collective over all ranks."""
    mine = None
    if failure is not None and failure.error is not None and not isinstance(failure.error, FormVaried):
        message = f"{type(failure.error).__name__}: {failure.error}"
        mine = (failure.time, mesh.rank, failure.layer, failure.action, message)
    known = [told for told in mesh.world.all_gather_object(mine) if told is not None]
    _, rank, layer, action, message = min(known, default=(0.0, mesh.rank, "", "the step", "stopped by another rank"))
    raise StepFailed(rank, layer, action, message) from (failure.error if failure and rank == mesh.rank else None)


def explain_hang(error: LinkError, mesh: Mesh, program: Program) -> None:
    """Add to an error of the link what every rank was doing."""
    error.add_note(f"{hang_report(mesh.board, program.rows)}")
