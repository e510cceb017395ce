"""The steps of a run: each is read, run by the runner until all forms are agreed, and remembered until the next."""

from __future__ import annotations

from typing import Any

from pipeline.agreement import Call, Closing, Wishes
from pipeline.errors import NotPlanned
from pipeline.exchange import Forms, ShapeTable
from pipeline.executor import Executor
from pipeline.intake import Intake, take_in
from pipeline.layer import Place
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.runner import Runner
from pipeline.step import Step
from pipeline.watch import At
from schedules import Schedule
from schedules.restrict import forwards_of

__all__ = ["Steps"]


class Steps:
    """Numbers the steps of any kind, keeps what ranks know of the forms of messages, and the last step."""

    def __init__(self, module: PipelineModule, seed: int) -> None:
        self._module = module
        self._seed = seed
        self._number = 0
        self._tables = {True: ShapeTable(), False: ShapeTable()}  # by whether gradients flow
        self._last: tuple[Step, Executor] | None = None
        self._trained: Executor | None = None  # of the last training step

    def start_over(self, runner: Runner) -> None:
        """Stages are others now: nothing is known of what passes between them."""
        self._tables = {True: ShapeTable(), False: ShapeTable()}
        for table in self._tables.values():
            table.varying |= runner.varying
        self._last = self._trained = None

    def learn_varying(self, runner: Runner) -> None:
        """Stages have been made."""
        for table in self._tables.values():
            table.varying |= runner.varying

    def read(
        self, source: Any, call: Call, *, mesh: Mesh, schedule: Schedule, limit: int, rows: int | None, updates: int
    ) -> Intake:
        """Read up to ``limit`` items, for training so many ``rows`` where they are given, and agree on the step, which
        comes after so many ``updates``.  Collective."""
        train = call is Call.TRAIN_BATCH
        self._number += 1
        mesh.board.begin(self._number)
        return take_in(
            source,
            call,
            mesh=mesh,
            schedule=schedule if train else forwards_of(schedule, limit),
            module=self._module,
            table=self._tables[train],
            limit=limit,
            rows=rows if train else None,
            steps=updates,
        )

    def run(
        self,
        intake: Intake,
        call: Call,
        runner: Runner,
        *,
        mesh: Mesh,
        limit: int,
        updates: int,
        scale: float,
        wishes: Wishes,
    ) -> tuple[Step, Closing]:
        """Run what was read up to its closing agreement; losses are multiplied by ``scale``.  Collective."""
        opening, train = intake.opening, call is Call.TRAIN_BATCH
        table = self._tables[train]
        while True:
            step = Step(
                number=self._number,
                train=train,
                with_loss=call is not Call.FORWARD,
                items=intake.items,
                places=[
                    Place.at(self._seed, updates, mesh.data_rank * limit + i) for i in range(opening.micro_batches)
                ],
                shares=opening.shares,
                seeds=[share * scale for share in opening.shares],
                forms=Forms(table, opening.signatures),
            )
            executor, closing = runner.attempt(step, wishes=wishes)
            if not closing.varied:
                break
            table.varying |= closing.varied  # from now on headers go ahead of what enters these
            self._number += 1
            mesh.board.begin(self._number)
        table.learn(step.forms, intake.signatures)
        self._last = step, executor
        if train:
            self._trained = executor
        mesh.board.at(At.OUTSIDE)
        return step, closing

    @property
    def last(self) -> tuple[Step, Executor]:
        """The last step of any kind, and what ran it.  Raises ``NotPlanned`` before there is one in this layout."""
        if self._last is None:
            raise NotPlanned("no step has run yet; call train_batch, eval_batch or forward first")
        return self._last

    @property
    def trained(self) -> Executor:
        """What ran the last training step, or, before there is one, the last step of any kind."""
        return self._trained or self.last[1]

    def losses(self, mesh: Mesh) -> dict[str, float]:
        """The losses that layers added in the last step, as weighted means over it.  Collective."""
        step, _ = self.last
        mine = {
            name: sum(float(loss) * step.shares[i] for i, loss in sorted(by_micro_batch.items()) if step.shares[i])
            for name, by_micro_batch in step.added.items()
        }
        total: dict[str, float] = {}
        for losses in mesh.world.all_gather_object(mine):
            for name, value in losses.items():
                total[name] = total.get(name, 0.0) + value
        return total
