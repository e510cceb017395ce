"""The engine: trains, evaluates and runs a model by a Plan."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partition import Profile, predict_timeline
from partition.errors import FewerLayersThanStages
from pipeline import checkpoint
from pipeline.agreement import Call, Closing
from pipeline.balance import Balancer
from pipeline.batch import Item
from pipeline.build import ParamGroups, check_ready_modules
from pipeline.config import PipelineConfig
from pipeline.errors import CheckpointError, ConfigError, NonFiniteLoss, NotPlanned, TrainingWarning
from pipeline.gradients.health import GradientHealth
from pipeline.gradients.report import ModelSplit, model_split
from pipeline.layer import RandomSource
from pipeline.memory import MemoryReport, held_by, predicted_memory
from pipeline.mesh import Mesh, make_mesh
from pipeline.migrate import Moved, hold, move
from pipeline.module import PipelineModule
from pipeline.plan import Plan, agree_on, environment, plan_for
from pipeline.planning import changed, choose_plan, next_plan, planned_costs
from pipeline.precision.loss_scale import LossScale, scaling_of
from pipeline.precision.types import types_of
from pipeline.recorder import measured_timeline
from pipeline.runner import Runner
from pipeline.state import gather_to_first, load_named, named_state
from pipeline.stats import StepStats, stats_of
from pipeline.step import Step
from pipeline.steps import Steps
from pipeline.update import MakeOptimizer, MakeScheduler, Updater
from pipeline.verdict import judge
from schedules import Timeline

__all__ = ["Engine"]


class Engine:
    """Made by ``pipeline.initialize``.  Every method that is called collective must be called on all ranks."""

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
        self.module = module
        self.config = config
        self.mesh = mesh
        self.steps = 0
        """Updates applied so far."""
        self.stats: StepStats | None = None
        self.loss_scale, self._scaling = scaling_of(config, types_of(config.precision, module))
        """The loss scale of the next step, and how many were skipped; None where no layer computes in fp16."""
        self._make = (make_optimizer, make_scheduler, param_groups)
        self._random = RandomSource(config.seed, mesh.device, mesh.random_lock)
        self._names = tuple(f"{i} ({module.type_of(i)})" for i in range(len(module)))
        self._health = GradientHealth(self._names)
        self._run_steps = Steps(module, config.seed)
        self._stopping = self._asked_to_stop = False
        self._runner: Runner | None = None
        self.balancer: Balancer | None = None
        """What moves layers while training runs; its ``notes`` say what it saw, did and expects."""
        self.profile = profile or (Profile.load(config.profile) if config.profile else None)
        agree_on(environment(config, module, mesh), mesh.world)
        check_ready_modules(module, mesh.world)
        self.schedule = plan_for(config, module, mesh, cuts=(0, len(module))).build_schedule()
        """The schedule of a whole training step."""
        if self.schedule.forward_only and make_optimizer is not None:
            raise ConfigError(f"schedule {config.schedule!r} has no backward; to train, set schedule to 1f1b, say")
        if len(module) < self.schedule.num_layer_groups and not isinstance(config.partition, tuple):
            raise FewerLayersThanStages(len(module), self.schedule.num_layer_groups)
        if config.recompute == "auto" and config.partition != "profile" and self.profile is None:
            raise ConfigError(
                'recompute = "auto" must know what layers keep and cost; set partition = "profile", or give a profile'
            )
        if config.partition != "profile" or self.profile is not None:
            self._plan(None)

    # -- training --------------------------------------------------------------------------------------------

    def train_batch(self, source: Any) -> Tensor:
        """One optimizer step on up to ``micro_batches`` items of an iterator.  Collective.

        ``source`` is read only on ranks that hold the first or last stage of a route; others may pass None.  An
        item is ``(inputs, targets)``.  Returns the step's loss, the mean over its samples: a detached scalar on the
        rank's device, the same on every rank.

        Raises ``EndOfData`` when no item is left, ``StepFailed`` on all ranks when a layer raised on one,
        ``NonFiniteLoss`` for a loss or gradient that is not finite; the model is then as it was before the step.
        """
        if self._make[0] is None:
            raise NotPlanned("this engine has no optimizer, so it cannot train; pass optimizer=... to initialize")
        _, closing = self._run(source, Call.TRAIN_BATCH)
        runner, update = self._planned(), self._updater()
        used = 1.0 if self.loss_scale is None else self.loss_scale.value
        verdict = judge(closing, self.steps, self.config, self.loss_scale, self._scaling, self._names)
        self.stats = stats_of(closing, verdict, self.mesh.size, used)
        self.loss_scale = verdict.scale
        if self.balancer is not None and (verdict.refusal or verdict.skipped):
            self.balancer.forget_step()
        if verdict.refusal:
            runner.undo()
            raise NonFiniteLoss(verdict.refusal)
        if verdict.skipped:
            runner.undo()
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
        self.steps += 1
        self._balance(closing)
        return closing.loss

    def _balance(self, closing: Closing) -> None:
        """Move layers, where the balancer says so."""
        if self.balancer is None:
            return
        runner = self._planned()
        plan = self.balancer.after_step(closing, runner, self.config, self.mesh, self.profile)
        if plan is not None:
            started = time.perf_counter()
            self._adopt(self.config, self.mesh, plan)
            self.balancer.moved(time.perf_counter() - started)

    def eval_batch(self, source: Any) -> Tensor:
        """The loss on up to ``micro_batches`` items, without gradients and in evaluation mode.  Collective."""
        _, closing = self._run(source, Call.EVAL_BATCH)
        return closing.loss

    def forward(self, source: Any) -> tuple[Any, ...] | None:
        """The outputs by micro-batch on the rank of the last stage, None elsewhere.  Collective.

        Runs without gradients and in evaluation mode; items are ``(inputs, targets)``, targets are not used.
        """
        step, _ = self._run(source, Call.FORWARD)
        return tuple(step.outputs[i] for i in sorted(step.outputs)) or None

    def losses(self) -> dict[str, float]:
        """The losses that layers added in the last step, as weighted means over it.  Collective."""
        return self._run_steps.losses(self.mesh)

    # -- state -----------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model on rank 0, as copies in host memory; empty elsewhere.

        Collective.  Names are ``layers.3.attn.weight`` whatever the layout; a tied parameter has one entry, under
        its first layer.
        """
        runner = self._planned()
        with runner.whole():
            return gather_to_first(named_state(runner.built, runner.all_ties).owned, self.mesh)

    def load_full_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Set all parameters and buffers from what ``full_state_dict`` gave, passed on every rank.  Collective.

        Raises ``StateError`` on every rank, with nothing changed, when names or shapes are not those of the model.
        """
        runner = self._planned()
        with runner.whole():
            load_named(named_state(runner.built, runner.all_ties), values, self.mesh.world)
            runner.rewritten()

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Write a checkpoint into a directory of checkpoints, on any layout to be loaded on any other.  Collective.

        Returns its own path.  It appears under that path, and as the directory's latest, when it is whole.
        """
        runner = self._planned()
        ties, updater = runner.all_ties, runner.update
        header: dict[str, Any] = {"steps": self.steps, "seed": self.config.seed, "layers": len(self.module)}
        with runner.whole():
            state = named_state(runner.built, ties).owned
            tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in state.items()}
            if updater is not None:
                header["optimizer"] = type(updater.optimizer).__name__
                tensors |= checkpoint.optimizer_entries(updater.optimizer, updater.flat, ties)
                header["groups"] = updater.settings()
                header["scheduler"] = updater.scheduler.state_dict() if updater.scheduler is not None else None
                header["loss_scale"] = asdict(self.loss_scale) if self.loss_scale is not None else None
                tensors |= checkpoint.master_entries(updater.flat, ties)
            return checkpoint.save(Path(directory), self.steps, tensors, header, self.profile, self.mesh)

    def load_checkpoint(self, path: str | Path) -> Path:
        """Go on from a checkpoint, or from the latest of a directory: the same bits as without the stop.  Collective.

        Before the first step, the profile in the checkpoint takes the place of a new measurement.  Returns the
        path of what was loaded.  Raises ``CheckpointError`` on every rank, before anything is changed, where there is
        none, or one of another model or optimizer.
        """
        found = checkpoint.latest(Path(path))
        header, profile = checkpoint.read_header(found)
        if header["layers"] != len(self.module):
            raise CheckpointError(
                f"{found} is of a model of {header['layers']} layers, this one has {len(self.module)}"
            )
        if self._runner is None and self.profile is None and profile is not None:
            self.profile = profile
            self._plan(None)
        runner = self._planned()
        with runner.whole():
            state = named_state(runner.built, runner.all_ties)
            tensors = {f"model.{name}": t for name, t in (*state.owned.items(), *state.copies.items())}
            optimizer = None if runner.update is None else runner.update.optimizer
            checkpoint.require_fit(found, header, tensors, optimizer, self.mesh)
            checkpoint.load_tensors(found, tensors)
            runner.rewritten()
        if runner.update is not None and "groups" in header:
            checkpoint.restore_masters(runner.update.flat, runner.all_ties, found)
            runner.updated()
            checkpoint.restore_optimizer(runner.update.optimizer, runner.update.flat, runner.all_ties, found)
            runner.update.restore(header["groups"], header["scheduler"])
            if self.loss_scale is not None and header.get("loss_scale"):
                self.loss_scale = LossScale(**header["loss_scale"])
        self.steps = header["steps"]
        return found

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
        mesh = make_mesh(config.data_parallel, device=config.device, link=config.link, timeout=config.timeout)
        return self._adopt(config, mesh, next_plan(config, self.module, mesh, self._random, self.profile))

    def _adopt(self, config: PipelineConfig, mesh: Mesh, plan: Plan) -> Moved:
        """Go on by another Plan.  Collective."""
        old = self._planned()
        holding = hold(old)
        new = Runner(plan, self.module, config, mesh, self._random, *self._make, before=old)
        moved = move(holding, old, new, self.module, mesh)
        self.config, self.mesh = config, mesh
        self._run_steps.start_over(new)
        self._install(new)
        return moved

    def _install(self, runner: Runner) -> None:
        self._runner, self.schedule = runner, runner.schedule
        if self.config.balance == "off" and self.balancer is not None:
            self.balancer.stop()
            self.balancer = None
        elif self.config.balance != "off" and self.balancer is None:
            self.balancer = Balancer(self.config, self.mesh)
        if self.balancer is not None:
            self.balancer.watch(runner)

    # -- stopping --------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask that training ends after the current step; may be called from a signal handler, on any one rank."""
        self._asked_to_stop = True

    @property
    def should_stop(self) -> bool:
        """Whether some rank had asked to stop when the last step ended: the same on every rank."""
        return self._stopping

    def share(self, value: Any) -> Any:
        """The value that the rank of the last stage gives, on every rank of the pipeline.  Collective."""
        last = self.schedule.rank_of_stage[self.schedule.last_stage(0)]
        return self.mesh.pipeline.broadcast_object(value, last)

    # -- what is planned -------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._planned().plan

    @property
    def optimizer(self) -> Optimizer:
        """This rank's optimizer; its groups are the same on every rank, its parameters flat vectors."""
        return self._updater().optimizer

    @property
    def lr_scheduler(self) -> Any:
        """What ``lr_scheduler`` made of the optimizer, None without one."""
        return self._updater().scheduler

    def timeline(self) -> Timeline:
        """What was measured in the last training step, or, before there is one, in the last step of any kind.

        Collective over a pipeline's ranks; the same on each.  Draw it with
        ``engine.predicted_timeline().save("bubbles.html", over=engine.timeline())``.
        """
        executor = self._run_steps.trained
        hop = self.profile.hop if self.profile is not None else 0.0
        return measured_timeline(executor.schedule, executor.stamps, self.mesh.pipeline, hop=hop)

    def predicted_timeline(self) -> Timeline:
        """What the profile taken before the first step says of a training step.

        Raises ``NotPlanned`` where there is no profile.
        """
        plan = self._planned().plan
        if self.profile is None:
            raise NotPlanned('there is no profile to predict from; set partition = "profile", or pass a profile')
        costs = planned_costs(self.config, plan, self.profile)
        if self.balancer is not None and self.balancer.profile is not None:
            costs = self.balancer.profile
        return predict_timeline(costs, plan.partition, self.schedule)

    def memory_report(self) -> MemoryReport:
        """What each rank of the pipeline holds now, in bytes, beside what was predicted where there is a profile.

        Collective over a pipeline's ranks; the same on each.  Optimizer state is there after the first step.
        """
        runner = self._planned()
        optimizer = None if runner.update is None else runner.update.optimizer
        measured = tuple(self.mesh.pipeline.all_gather_object(held_by(runner.built, optimizer)))
        if self.profile is None:
            return MemoryReport(measured, None)
        costs = planned_costs(self.config, runner.plan, self.profile)
        return MemoryReport(measured, predicted_memory(runner.plan, costs))

    def split_report(self) -> ModelSplit:
        """Which weights get their gradient by W, where the schedule has W apart, and which by I, and why.

        Known once a micro-batch has passed backward.  Collective over a pipeline's ranks; the same on each.
        """
        layers = self._planned().built.layers.values()
        mine = {layer.index: (layer.name, layer.binding.report()) for layer in layers if layer.binding is not None}
        return model_split(self.mesh.pipeline.all_gather_object(mine))

    def _planned(self) -> Runner:
        if self._runner is None:
            raise NotPlanned(
                "the layers are cut when the first micro-batch has been seen; call train_batch, eval_batch or forward "
                "first, give a saved profile, or set partition to a method that needs no costs"
            )
        return self._runner

    def _updater(self) -> Updater:
        updater = self._planned().update
        if updater is None:
            raise NotPlanned("this engine has no optimizer; pass optimizer=... to initialize")
        return updater

    def _plan(self, item: Item | None) -> None:
        """Make the Plan and all that depends on it; ``item`` is this rank's first micro-batch.  Collective."""
        plan, self.profile = choose_plan(
            self.config, self.module, self.mesh, self.schedule, self._random, item=item, profile=self.profile
        )
        runner = Runner(plan, self.module, self.config, self.mesh, self._random, *self._make)
        self._run_steps.learn_varying(runner)
        self._install(runner)

    # -- a step ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # whatever the caller is in: layers decide by the kind of step
    def _run(self, source: Any, call: Call) -> tuple[Step, Closing]:
        """Run one step of any kind up to its closing agreement."""
        limit, scale = self.config.micro_batches, 1.0 if self.loss_scale is None else self.loss_scale.value
        intake = self._run_steps.read(
            source, call, mesh=self.mesh, schedule=self.schedule, limit=limit, updates=self.steps
        )
        if self._runner is None:
            self._plan(intake.items[0] if intake.items else None)
        runner, stop = self._planned(), self._asked_to_stop
        step, closing = self._run_steps.run(
            intake, call, runner, mesh=self.mesh, limit=limit, updates=self.steps, scale=scale, stop=stop
        )
        self._stopping = closing.stop
        return step, closing
