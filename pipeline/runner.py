"""A planned model on one rank: its stages, its optimizer, and a compiled program for each kind of step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from pipeline import failures
from pipeline.agreement import Closing, Report, Wishes, close
from pipeline.before import Before
from pipeline.buffers import Snapshot, share_with_twins
from pipeline.build import NO_LAYERS, ParamGroups, build_layers
from pipeline.comm.ways import Ways
from pipeline.config import PipelineConfig
from pipeline.errors import FormVaried, GradientError, LinkError, LossError, ModelError
from pipeline.executor import Executor
from pipeline.layer import Layer, RandomSource
from pipeline.mesh import Mesh
from pipeline.module import PipelineModule
from pipeline.plan import Plan
from pipeline.precision.types import loss_cast, types_of
from pipeline.random_state import preserved
from pipeline.stage import Stage
from pipeline.step import Failure, Step
from pipeline.ties import Held, Role, TiedGradients, with_twins
from pipeline.update import MakeOptimizer, MakeScheduler, Updater, squared_norms
from pipeline.watch import At
from pipeline.zero.stage import LayerShards, StageShards
from schedules import Schedule, lower
from schedules.restrict import forwards_of, shortened
from schedules.sharing import Sharing

__all__ = ["Runner"]


class Runner:
    """Everything on one rank that depends on the Plan.  Making one is collective over all ranks.

    ``before`` is that of another layout, which must not be used any more: what stays on its rank is taken over, and all
    other values are to be filled in (``migrate``).
    """

    def __init__(
        self,
        plan: Plan,
        module: PipelineModule,
        config: PipelineConfig,
        mesh: Mesh,
        ways: Ways,
        random: RandomSource,
        make_optimizer: MakeOptimizer | None,
        make_scheduler: MakeScheduler | None,
        param_groups: ParamGroups | None,
        before: Runner | None = None,
    ) -> None:
        self.plan = plan
        self.schedule = plan.build_schedule()
        self.mesh = mesh
        self.ways = ways
        self._config = config
        self.zero = plan.zero
        own = self.schedule.stages_of_rank(mesh.pipe_rank)
        layers_of_stage = {stage: _layers_of_stage(stage, self.schedule, plan) for stage in own}
        self.all_ties = with_twins(module, 1 + max(self.schedule.copy_of_stage))
        self._types = types = types_of(config.precision, module)
        self.built = build_layers(
            module,
            {held for layers in layers_of_stage.values() for held in layers},
            self.all_ties,
            random,
            mesh.pipeline,
            ways,
            zero=self.zero,
            uncut=config.optimizer_view == "parameters",
            types=types,
            param_groups=param_groups,
            recompute=plan.recompute,
            reference_numerics=config.reference_numerics,
            compiler=config.compile,
            before=Before(NO_LAYERS) if before is None else before.leave(),
        )
        self.sharing = _sharing(config, self.zero, self.schedule, plan)
        loss = Layer(len(module), "loss", lambda pair: module.loss_fn(*pair), random, cast=loss_cast(types))
        self.stages = {stage: self._stage(stage, layers, loss) for stage, layers in layers_of_stage.items()}
        self.varying = _varying_stages(module, self.schedule, plan)
        self._rank_of_layer = self._world_rank_of_layer()
        self.ties = TiedGradients(self.all_ties, self.built.shards, self._rank_of_layer, mesh.link)
        mesh.link.connect(self._pairs())
        if make_optimizer is not None and not self.built.trainable:
            raise ModelError("no parameter of the model is trainable; set requires_grad on what is to be trained")
        old: Updater | None = None if before is None else before.update
        self.update: Updater | None = None
        if make_optimizer is not None:
            self.update = Updater(self.built, make_optimizer, make_scheduler, old)
        with self._shown():  # and hidden from now on
            pass
        self._training: bool | None = None
        self._before: list[Snapshot] = []
        self._executors: dict[tuple[bool, int], Executor] = {}

    def leave(self) -> Before:
        """What another layout can take on from this one, which is not to be used any more.  Collective."""
        return Before.leave(self.built, self._types, self.mesh.world)

    def _stage(self, stage: int, layers: Sequence[Held], loss: Layer) -> Stage:
        ends = {route[-1] for route in self.schedule.routes}
        return Stage(
            stage,
            [self.built.layers[held] for held in layers],
            loss if stage in ends else None,
            self._shards(stage, layers) if self.mesh.data > 1 else None,
        )

    def _shards(self, stage: int, layers: Sequence[Held]) -> StageShards:
        homes = {
            shard.vector.parameters.untyped_storage()._cdata: shard
            for shards in self.built.shards.values()
            for shard in shards
        }
        found = []
        for held in layers:
            layer, own = self.built.layers[held], self.built.shards.get(held, ())
            storages = [] if layer.module is None else [p.untyped_storage()._cdata for p in layer.module.parameters()]
            used = tuple(homes[storage] for storage in dict.fromkeys(storages))
            matrices = tuple(shard for shard in own if shard.vector.sort.matrix)
            found.append(LayerShards(layer, used, matrices, tuple(s for s in own if s not in matrices)))
        stay = self.sharing.gather != "pass" or stage in self.sharing.stays
        return StageShards(
            found,
            in_parts=self.zero > 0,
            stay=stay,
            ahead=self._config.zero_whole_layers - 1,
            bucketed=self.sharing.reduce == "pass",
        )

    def _world_rank_of_layer(self) -> dict[Held, int]:
        """The rank, in this rank's own pipeline, that holds each copy of each layer."""
        return {
            held: self.mesh.world_rank(self.mesh.data_rank, rank)
            for stage, rank in enumerate(self.schedule.rank_of_stage)
            for held in _layers_of_stage(stage, self.schedule, self.plan)
        }

    def _pairs(self) -> list[tuple[int, int]]:
        """Ranks of the world, the first of which sends to the second: activations, gradients, gradients of ties."""
        own = {self.mesh.world_rank(self.mesh.data_rank, rank): rank for rank in range(self.mesh.pipe)}
        pairs = {*lower(self.schedule).messages, *((own[a], own[b]) for a, b in self.ties.pairs)}
        rows = range(self.mesh.data)
        return sorted((self.mesh.world_rank(d, a), self.mesh.world_rank(d, b)) for d in rows for a, b in pairs)

    def executor(self, *, train: bool, micro_batches: int) -> Executor:
        """The compiled program of a step of this many micro-batches; made on first use and kept."""
        found = self._executors.get((train, micro_batches))
        if found is not None:
            return found
        restrict = shortened if train else forwards_of
        program = lower(restrict(self.schedule, micro_batches), self.sharing)
        made = Executor(
            program,
            self.mesh.pipe_rank,
            self.stages,
            self.mesh.link,
            [self.mesh.world_rank(self.mesh.data_rank, rank) for rank in range(self.mesh.pipe)],
            self.mesh.board,
            self.mesh.device,
            depth=self._config.receive_ahead,
            batch_weights=self._config.weight_grad_batching,
        )
        self._executors[train, micro_batches] = made
        return made

    def attempt(self, step: Step, *, wishes: Wishes) -> tuple[Executor, Closing]:
        """Run a step up to its closing agreement.  Collective over all ranks.

        Raises ``StepFailed`` where a layer raised and ``LossError`` where no gradient starts, on all ranks.  When the
        closing agreement tells of stages whose input varied, the step is to be run again.  In all these cases the
        model is as it was before.
        """
        mesh = self.mesh
        self._set_mode(step.train)
        executor = self.executor(train=step.train, micro_batches=len(step.places))
        if step.train:
            self._prepare()
        try:
            with self._shown(), nullcontext() if mesh.random_lock else preserved(mesh.device):
                executor.run(step)
                if step.train:
                    self._check_gradients(step)
            if step.train:
                self.ties.add()
            closing = self._close(step, executor, wishes)
        except LinkError as error:
            failures.explain_hang(error, mesh, executor.program.rows)
            raise
        if closing.varied:  # goes before failures: what was sent in place of the value may be their cause
            self.undo()
        elif closing.failed:
            self.undo()
            failures.raise_first(mesh, step.failure)
        elif step.train and not closing.rooted:
            self.undo()
            raise LossError(
                "no gradient starts at the loss: it depends on no trainable parameter; look for detach(), item(), "
                "argmax or no_grad() between the parameters and what loss_fn returns"
            )
        elif step.train:
            self._share_buffers()
        return executor, closing

    def _close(self, step: Step, executor: Executor, wishes: Wishes) -> Closing:
        self.mesh.board.at(At.CLOSING)
        raised = None if step.failure is None else step.failure.error
        varied = raised.stage + 1 if isinstance(raised, FormVaried) else 0
        failed = raised is not None and not varied
        stamps = executor.stamps
        return close(
            self.mesh,
            self._config.micro_batches,
            Report(failed, varied, step.rooted, *wishes, stamps.busy, stamps.end - stamps.begin),
            losses=step.losses,
            shares=step.shares,
            squared_norms=self._squared_norms() if step.train else [],
            sharded=self.zero > 0,
        )

    def _prepare(self) -> None:
        """Make ready for a training step: gradients in place, and what it may change kept."""
        for flat in self.built.flats.values():
            flat.attach_gradients()
        self._before = [layer.buffers.snapshot() for layer in self.built.layers.values()]

    def _check_gradients(self, step: Step) -> None:
        """Let the step fail on this rank when some gradient went elsewhere than where it is looked for."""
        for held, flat in self.built.flats.items():
            try:
                flat.check_gradients()
            except GradientError as error:
                layer = self.built.layers[held].name
                step.failure = step.failure or Failure("the end of the step", layer, error, time.time())

    def undo(self) -> None:
        """Make gradients and buffers what they were before the last training step, which has not updated anything."""
        self.zero_gradients()
        for shards in self.built.shards.values():
            for shard in shards:
                shard.forget_step()
        for snapshot in self._before:
            snapshot.put_back()

    def _share_buffers(self) -> None:
        """Give every copy of the pipeline, and the second copy of a layer, the first one's running statistics and the
        like, once a step: evaluation, state and checkpoints then do not depend on which copy is asked."""
        if self.mesh.data > 1:
            for layer in self.built.layers.values():
                layer.buffers.share(self.ways.states)
        if max(self.schedule.copy_of_stage):
            buffers = {held: layer.buffers for held, layer in self.built.layers.items()}
            share_with_twins(buffers, self._rank_of_layer, self.mesh.link)

    def _set_mode(self, train: bool) -> None:
        """Put all layers into training or evaluation mode."""
        if train is not self._training:
            self._training = train
            for stage in self.stages.values():
                stage.train(train)

    def _squared_norms(self) -> list[Tensor | float]:
        """The squared norm of each layer's gradients, as far as this rank is the one to count them."""
        counts = self.zero or self.mesh.data_rank == 0
        return squared_norms(self.built.stretches(Role.OWNER) if counts else [], self.plan.partition.cuts[-1])

    def zero_gradients(self) -> None:
        """Set all gradients of all uses to 0."""
        for held, flat in self.built.flats.items():
            flat.zero_gradients()
            for shard in self.built.shards[held]:
                shard.zero_gradients()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While open, all parameters of this rank are whole.  Collective over replicas."""
        shards = [shard for shards in self.built.shards.values() for shard in shards]
        for shard in shards:
            shard.gather()
        for shard in shards:
            shard.ready()
        with self._shown():
            try:
                yield
            finally:
                for shard in shards:
                    shard.release()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """While open, modules hold the parameters that they compute with; else, where ranks have only parts, none."""
        hidden = self.built.flats.values() if self.zero >= 3 else ()
        for flat in hidden:
            flat.show()
        try:
            yield
        finally:
            for flat in hidden:
                flat.hide()

    def rewritten(self) -> None:
        """The whole parameters have been changed, on all replicas alike."""
        for shards in self.built.shards.values():
            for shard in shards:
                shard.take_from_whole()

    def updated(self) -> None:
        """What the optimizer steps on has been changed."""
        for shards in self.built.shards.values():
            for shard in shards:
                shard.updated()


def _sharing(config: PipelineConfig, zero: int, schedule: Schedule, plan: Plan) -> Sharing:
    """How often stages exchange parameters and gradients with their replicas."""
    small = [
        stage
        for stage, group in enumerate(schedule.layer_group_of_stage)
        if len(plan.partition.layers_of(group)) <= config.zero_whole_layers
    ]
    return Sharing(
        "never" if zero == 0 else "step" if zero < 3 else "pass",
        "pass" if zero >= 2 and config.zero_reduce_every == "micro_batch" else "step",
        frozenset(small),
    )


def _layers_of_stage(stage: int, schedule: Schedule, plan: Plan) -> list[Held]:
    """The layers of a stage, and which copy of them it holds."""
    layers = plan.partition.layers_of(schedule.layer_group_of_stage[stage])
    return [Held(layer, schedule.copy_of_stage[stage]) for layer in layers]


def _varying_stages(module: PipelineModule, schedule: Schedule, plan: Plan) -> frozenset[int]:
    """Stages whose input comes, directly or not, from a layer that declares data-dependent shapes."""
    first = next((i for i in range(len(module)) if module.shapes_depend_on_data(i)), None)
    if first is None:
        return frozenset()
    return frozenset(
        stage
        for stage, group in enumerate(schedule.layer_group_of_stage)
        if plan.partition.layers_of(group).start > first
    )
