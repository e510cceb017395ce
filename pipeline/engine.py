"""The engine: trains, evaluates and runs a model by a Plan."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partition import Profile
from pipeline.agreement import Call, Closing, Wishes
from pipeline.balance import Balancer
from pipeline.batch import Item
from pipeline.build import ParamGroups
from pipeline.comm.ways import ways_of
from pipeline.config import PipelineConfig
from pipeline.entries import hold
from pipeline.errors import CheckpointError, NotPlanned, TrainingStopped, TrainingWarning
from pipeline.gradients.health import GradientHealth
from pipeline.guard import LossGuard
from pipeline.intake import Intake
from pipeline.layer import RandomSource
from pipeline.mesh import Mesh
from pipeline.migrate import Moved, move
from pipeline.module import PipelineModule
from pipeline.plan import Plan, agree_on
from pipeline.planned import Planned
from pipeline.planning import changed, choose_plan, mesh_for, next_plan
from pipeline.precision.adaptive import first_overflow
from pipeline.precision.faster import faster_in_bf16
from pipeline.precision.loss_scale import scaling_of
from pipeline.precision.types import types_of
from pipeline.runner import Runner
from pipeline.saving.keeper import Keeper, Progress, Stateful
from pipeline.sizing import choose_size, with_number
from pipeline.stats import StepStats, stats_of
from pipeline.step import Step
from pipeline.update import MakeOptimizer, MakeScheduler
from pipeline.verdict import Verdict, judge

__all__ = ["Engine"]


class Engine(Planned):
    """Made by ``pipeline.initialize``: it trains, evaluates, saves, loads, and changes how the model is laid out."""

    def __init__(
        self,
        module: PipelineModule,
        config: PipelineConfig,
        mesh: Mesh,
        make_optimizer: MakeOptimizer | None,
        make_scheduler: MakeScheduler | None,
        param_groups: ParamGroups | None,
        profile: Profile | None,
    ) -> None:
        super().__init__(module, config, mesh, (make_optimizer, make_scheduler, param_groups), profile)
        self.items = 0
        """Items that each data-parallel rank has taken of its iterators to train on."""
        self.stats: StepStats | None = None
        self.loss_scale, self._scaling = scaling_of(config, types_of(config.precision, module))
        """The loss scale of the next step, and how many were skipped; None where no layer computes in fp16."""
        self._random = RandomSource(config.seed, mesh.device, mesh.random_lock)
        self._names = tuple(f"{i} ({module.type_of(i)})" for i in range(len(module)))
        self._health = GradientHealth(self._names)
        self._guard = LossGuard()
        self._keeper = Keeper(config, mesh)
        self._stopping = self._asked_to_stop = False
        measures = config.partition == "profile" or config.micro_batch == "auto"
        if not measures or self.profile is not None:
            self._plan(None)

    # -- training --------------------------------------------------------------------------------------------

    def train_batch(self, source: Any) -> Tensor:
        """One optimizer step on up to ``micro_batches`` items of an iterator.  Collective.

        Where ``global_batch`` is set, on items that together hold this data-parallel rank's part of its rows.

        ``source`` is read only on ranks that hold the first or last stage of a route; others may pass None.  An
        item is ``(inputs, targets)``.  Returns the step's loss, the mean over its samples: a detached scalar on the
        rank's device, the same on every rank.

        Raises ``EndOfData`` when no item is left, ``StepFailed`` on all ranks when a layer raised on one,
        ``NonFiniteLoss`` or ``LossSpike`` where the settings want it; the model is then as it was before the step.
        After ``request_stop`` has ended training, raises ``TrainingStopped``, which ends the program with code 0.
        """
        if self._make[0] is None:
            raise NotPlanned("this engine has no optimizer, so it cannot train; pass optimizer=... to initialize")
        if self._stopping:
            raise TrainingStopped
        taken, closing = self._run(source, Call.TRAIN_BATCH)[1:]
        self.items += taken
        self._stopping = closing.stop
        runner, update = self._planned(), self._updater()
        used = 1.0 if self.loss_scale is None else self.loss_scale.value
        verdict = judge(closing, self.steps, self.config, self.loss_scale, self._scaling, self._names, self._guard)
        self.stats = stats_of(closing, verdict, self.mesh.size, used)
        self.loss_scale = verdict.scale
        if verdict.action != "apply":
            runner.undo()
            self._withhold(verdict)
            self._adapt_precision(closing)
            self._keep(due=False, last=closing.stop)
            return closing.loss
        advice = self._health.observe(closing.squared_norms)
        if advice and self.mesh.rank == 0:
            warnings.warn(advice, TrainingWarning, stacklevel=2)
        if verdict.factor != 1.0:
            update.scale_gradients(verdict.factor)
        try:
            update.step()
        finally:  # where the optimizer raises, its gradients must not be added to those of the next step
            runner.zero_gradients()
            runner.updated()
        self._guard.applied(self.steps, float(closing.loss))
        self.steps += 1
        self._balance(closing)
        self._adapt_precision(closing)
        self._keep(due=closing.save, last=closing.stop)
        return closing.loss

    def _withhold(self, verdict: Verdict) -> None:
        """What is to happen instead of the update of a step.  Raises what refuses it, if that is wanted."""
        if self.balancer is not None:
            self.balancer.forget_step()
        if verdict.refusal is not None:
            raise verdict.refusal
        what = "the step is skipped"
        if verdict.action == "rollback":
            items = self.items
            what = f"going back to {self.load_checkpoint()}, and on with the next data"
            self.items = items  # those that spoiled the step are not taken again
        if verdict.text and self.mesh.rank == 0:
            warnings.warn(f"{verdict.text}: {what}", TrainingWarning, stacklevel=3)

    def _balance(self, closing: Closing) -> None:
        """Move layers, where the balancer says so."""
        if self.balancer is None:
            return
        runner = self._planned()
        plan = self.balancer.after_step(closing, runner, self.config, self.mesh, self.profile)
        if plan is not None:
            started = time.perf_counter()
            self._adopt(with_number(self.config, plan.micro_batches), self.mesh, plan)
            self.balancer.moved(time.perf_counter() - started)

    def _adapt_precision(self, closing: Closing) -> None:
        """Give layers other types, where that is due."""
        told = len(self._precision.notes)
        if self._precision.observe(first_overflow(closing)):
            self._use_precision()
        for note in self._precision.notes[told:] if self.mesh.rank == 0 else ():
            warnings.warn(note, TrainingWarning, stacklevel=3)

    def _use_precision(self) -> None:
        config = self.config.model_copy(update={"precision": self._precision.precision})
        self._adopt(config, self.mesh, self._planned().plan)

    def _keep(self, *, due: bool, last: bool) -> None:
        """Write a checkpoint, where one is due or it is the last step."""
        self._keeper.tell()
        if due or (last and self.config.save_to is not None):
            self.save_checkpoint(wait=last)

    def eval_batch(self, source: Any) -> Tensor:
        """The loss on up to ``micro_batches`` items, without gradients and in evaluation mode.  Collective."""
        _, _, closing = self._run(source, Call.EVAL_BATCH)
        return closing.loss

    def forward(self, source: Any) -> tuple[Any, ...] | None:
        """The outputs by micro-batch on the rank of the last stage, None elsewhere.  Collective.

        Runs without gradients and in evaluation mode; items are ``(inputs, targets)``, targets are not used.
        """
        step, _, _ = self._run(source, Call.FORWARD)
        return tuple(step.outputs[i] for i in sorted(step.outputs)) or None

    def losses(self) -> dict[str, float]:
        """The losses that layers added in the last step, as weighted means over it.  Collective."""
        return self._run_steps.losses(self.mesh)

    # -- state -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, directory: str | Path | None = None, *, wait: bool = True) -> Path:
        """Write a checkpoint into a directory of checkpoints, on any layout to be loaded on any other.  Collective.

        Returns its own path.  It appears under that path, and as the directory's latest, when it is whole.  Without
        ``wait`` it is written while training goes on, from copies in host memory.  ``directory`` is the setting
        ``save_to`` unless given.

        Raises ``CheckpointError`` on every rank when it cannot be written; without ``wait`` a later call tells.
        """
        progress = Progress(
            self.steps, self.items, self.loss_scale, self._guard.losses, self._precision.state_dict()
        )
        return self._keeper.save(directory, self._planned(), progress, self.profile, wait=wait)

    def finish_saving(self) -> Path:
        """Wait until the last checkpoint is safe, and return its path.  Collective.

        Raises ``CheckpointError`` on every rank when it could not be written.
        """
        return self._keeper.saver.finish()

    def load_checkpoint(self, path: str | Path | None = None) -> Path:
        """Go on from a checkpoint, or from the newest whole one of a directory: the same bits as without the stop.

        Collective.  ``path`` is the setting ``save_to`` unless given; those of a directory that are damaged are named
        in a warning.  Before the first step, the profile in the checkpoint takes the place of a new measurement.
        Returns the path of what was loaded.  Raises ``CheckpointError`` on every rank, before anything is changed,
        where there is none, or a damaged one, or one of another model or optimizer.
        """
        found = self.resume(path)
        if found is None:
            raise CheckpointError(f"there is no checkpoint in {self.config.save_to if path is None else path}")
        return found

    def resume(self, directory: str | Path | None = None) -> Path | None:
        """As ``load_checkpoint``, but None where there is no checkpoint yet.  Collective."""
        opened = self._keeper.open(directory, len(self.module))
        if opened is None:
            return None
        if self._runner is None and self.profile is None and opened.profile is not None:
            self.profile = opened.profile
            if self.config.micro_batch == "auto":
                self.config = with_number(self.config, opened.header["micro_batches"])
            self._plan(None)
        progress = self._keeper.restore(opened, self._planned())
        self.steps, self.items = progress.steps, progress.items
        self._guard.resume(progress.losses)
        self._precision.load_state_dict(progress.precision)
        if self._precision.precision != self.config.precision:
            self._use_precision()
        if self.loss_scale is not None and progress.loss_scale is not None:
            self.loss_scale = progress.loss_scale
        return opened.path

    def register(self, name: str, thing: Stateful) -> None:
        """Save the state of an object, a data loader say, with every checkpoint, and give it back with the next load.

        ``thing`` has ``state_dict`` and ``load_state_dict``; every rank registers its own, and that of each
        data-parallel rank's first stage is saved.  What has been loaded before is given at once.
        """
        self._keeper.register(name, thing)

    # -- layout ----------------------------------------------------------------------------------------------

    def relayout(self, **changes: Any) -> Moved:
        """Go on with other settings: another schedule, other cuts, ranks arranged otherwise.  Collective.

        ``changes`` are settings by name; weights, the optimizer's state, buffers and all else that training depends on
        move from rank to rank, only where they must.  Parameters that have been frozen or thawed are taken as they are.
        The optimizer and its schedule are new objects in the same state; user code that keeps state in a layer outside
        of parameters, buffers and ``get_extra_state`` loses it where the layer moves.

        Raises ``ConfigError`` for settings that cannot change while training runs, and what ``initialize`` raises for
        those that do not fit, before anything is changed.
        """
        config = changed(self.config, changes)
        agree_on({f"setting {name}": repr(value) for name, value in changes.items()}, self.mesh.world)
        mesh = mesh_for(config, self.profile)
        return self._adopt(config, mesh, next_plan(config, self.module, mesh, self._random, self.profile))

    def _adopt(self, config: PipelineConfig, mesh: Mesh, plan: Plan) -> Moved:
        """Go on by another Plan.  Collective."""
        old = self._planned()
        holding = hold(old)
        ways = ways_of(config, mesh, old.ways, timed=self.profile is not None)
        new = Runner(plan, self.module, config, mesh, ways, self._random, *self._make, before=old)
        moved = move(holding, old, new, self.module, mesh)
        self.config, self.mesh = config, mesh
        self._keeper.follow(config, mesh)
        self._run_steps.start_over(new)
        self._install(new)
        return moved

    def _install(self, runner: Runner) -> None:
        self._runner, self.schedule = runner, runner.schedule
        wanted = self.config.balance != "off" or self.config.balance_micro_batch != "off"
        if not wanted and self.balancer is not None:
            self.balancer.stop()
            self.balancer = None
        elif wanted and self.balancer is None:
            self.balancer = Balancer(self.config, self.mesh)
        if self.balancer is not None:
            self.balancer.watch(runner)

    # -- stopping --------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask that training ends after the current step of it, and a checkpoint is written where ``save_to`` is set.

        May be called from a signal handler, on any one rank.
        """
        self._asked_to_stop = True

    @property
    def should_stop(self) -> bool:
        """Whether some rank had asked to stop when the last training step ended: the same on every rank."""
        return self._stopping

    def _plan(self, item: Item | None) -> None:
        """Make the Plan and all that depends on it; ``item`` is this rank's first micro-batch.  Collective."""
        if self.config.micro_batch == "auto" and self.profile is None:
            self.config, self.profile, self._size_reason = choose_size(
                self.config, self.module, self.mesh, self.schedule, self._random, item
            )
        plan, self.profile = choose_plan(
            self.config, self.module, self.mesh, self.schedule, self._random, item=item, profile=self.profile
        )
        ways = ways_of(self.config, self.mesh, timed=self.profile is not None)
        if self.config.precision_lower and self.profile is not None:
            self._precision.may_lower(
                faster_in_bf16(self.config, self.module, self.mesh, self.schedule, self._random, item, self.profile)
            )
        runner = Runner(plan, self.module, self.config, self.mesh, ways, self._random, *self._make)
        self._run_steps.learn_varying(runner)
        self._install(runner)

    # -- a step ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # whatever the caller is in: layers decide by the kind of step
    def _run(self, source: Any, call: Call) -> tuple[Step, int, Closing]:
        """Run one step of any kind up to its closing agreement; also returns how many items were taken for it."""
        intake = self._read(source, call)
        taken = intake.opening.items
        if self._runner is None:
            begun = self.config.micro_batches
            self._plan(intake.items[0] if intake.items else None)
            if self.config.micro_batches != begun and call is Call.TRAIN_BATCH:  # for which size was chosen meanwhile
                intake = self._read(intake.items or source, call)
        runner, limit = self._planned(), self.config.micro_batches
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        trains = call is Call.TRAIN_BATCH
        wishes = Wishes(trains and self._asked_to_stop, trains and self._keeper.due(self.steps + 1))
        step, closing = self._run_steps.run(
            intake, call, runner, mesh=self.mesh, limit=limit, updates=self.steps, scale=scale, wishes=wishes
        )
        return step, taken, closing

    def _read(self, source: Any, call: Call) -> Intake:
        config = self.config
        return self._run_steps.read(
            source,
            call,
            mesh=self.mesh,
            schedule=self.schedule,
            limit=config.micro_batches,
            rows=config.rows,
            updates=self.steps,
        )
