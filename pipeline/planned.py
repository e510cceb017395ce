"""A model laid out by a Plan, and all that can be asked of it between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from partition import Profile
from partition.errors import FewerLayersThanStages
from pipeline.balance import Balancer
from pipeline.build import ParamGroups, check_ready_modules
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError, NotPlanned, StateError
from pipeline.gradients.report import ModelSplit, model_split
from pipeline.memory import MemoryReport, grown_since, held_by, kept_now
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.plan import Plan, agree_on, environment, plan_for
from pipeline.planning import planned_costs, predicted_memory
from pipeline.precision.adaptive import AdaptivePrecision
from pipeline.precision.types import types_of
from pipeline.predicting import predict_step
from pipeline.recorder import measured_timeline
from pipeline.runner import Runner
from pipeline.state import gather_to_first, load_named, named_state
from pipeline.steps import Steps
from pipeline.update import MakeOptimizer, MakeScheduler, Updater
from schedules import Timeline

__all__ = ["Made", "Planned"]

Made = tuple[MakeOptimizer | None, MakeScheduler | None, ParamGroups | None]
"""What makes the optimizer, its schedule, and the settings of each parameter."""


class Planned:
    """What an engine has.  Every method that is called collective must be called on all ranks."""

    def __init__(
        self, module: PipelineModule, config: PipelineConfig, mesh: Mesh, make: Made, profile: Profile | None
    ) -> None:
        self.module = module
        self.config = config
        self.mesh = mesh
        self.balancer: Balancer | None = None
        """What moves layers while training runs; its ``notes`` say what it saw, did and expects."""
        self.profile = profile
        self.steps = 0
        """Updates applied so far."""
        self._make = make
        self._precision = AdaptivePrecision(config, module, types_of(config.precision, module))
        self._size_reason = ""  # of micro-batches, where that was to be chosen
        self._kept: dict[int, dict[str, float]] = {}  # what layers kept after the steps when somebody asked
        self._runner: Runner | None = None
        self._run_steps = Steps(module, config.seed)
        agree_on(environment(config, module, mesh), mesh.world)
        check_ready_modules(module, mesh.world)
        self.schedule = plan_for(config, module, mesh, cuts=(0, len(module))).build_schedule()
        """The schedule of a whole training step."""
        if self.schedule.forward_only and make[0] is not None:
            raise ConfigError(f"schedule {config.schedule!r} has no backward; to train, set schedule to 1f1b, say")
        if len(module) < self.schedule.num_layer_groups and not isinstance(config.partition, tuple):
            raise FewerLayersThanStages(len(module), self.schedule.num_layer_groups)
        if config.micro_batch == "auto" and self.profile is not None:
            raise ConfigError(
                'micro_batch = "auto" times the layers at two sizes, and a profile is of one; leave out the profile, '
                "or set micro_batch to a number of rows"
            )
        unknown = config.partition != "profile" and config.micro_batch != "auto" and self.profile is None
        if config.memory_limit is not None and unknown:
            raise ConfigError(
                "what keeps within memory_limit must know what layers keep and cost; set partition = \"profile\", or "
                "give a profile"
            )

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

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen, and why: how ranks are arranged, micro-batches cut, and what is shared exchanged; then what
        the balancer saw, did and expects."""
        chosen = [self.mesh.reason, self._size_reason, *self._planned().ways.reasons]
        moved = [] if self.balancer is None else self.balancer.notes
        return (*filter(None, chosen), *self._precision.notes, *moved)

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

    def share(self, value: Any) -> Any:
        """The value that the rank of the last stage gives, on every rank of the pipeline.  Collective."""
        last = self.schedule.rank_of_stage[self.schedule.last_stage(0)]
        return self.mesh.pipeline.broadcast_object(value, last)

    # -- what is predicted, and what was ---------------------------------------------------------------------

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
        runner = self._planned()
        return predict_step(costs, plan, self.schedule, runner.sharing, runner.ways)

    def memory_report(self, since: int | None = None) -> MemoryReport:
        """What each rank of the pipeline holds now, in bytes, beside what was predicted where there is a profile.

        Collective over a pipeline's ranks; the same on each.  Optimizer state is there after the first step.
        ``since`` is the number of a step after which this was called before: the report then names the layers that
        keep more tensors now, beside parameters and buffers.

        Raises ``StateError`` where it was not.
        """
        runner = self._planned()
        optimizer = None if runner.update is None else runner.update.optimizer
        now = kept_now(runner.built, optimizer, alone=self.mesh.random_lock is None)
        before = now if since is None else self._kept.get(since)
        if before is None:
            known = ", ".join(map(str, self._kept)) or "none"
            raise StateError(
                f"memory_report was not called after step {since}, with which to compare; it was after: {known}"
            )
        self._kept[self.steps] = now
        return MemoryReport(
            tuple(self.mesh.pipeline.all_gather_object(held_by(runner.built, optimizer))),
            None if self.profile is None else predicted_memory(self.config, runner.plan, self.profile),
            since,
            grown_since(before, now, self.mesh.pipeline),
        )

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
