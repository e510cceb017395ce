"""The dynamic load balancer of a run: watches its steps, says which layers are to move, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from partition import LayerCost, Moves, Partition, Profile, make_partition
from partition.balancer import Alarm, Proposal, Steps, Terms, medians, propose
from partition.drift import Seconds, first_belief
from partition.moves import Move
from partition.sizes import Verdict
from pipeline.agreement import Closing
from pipeline.config import PipelineConfig
from pipeline.layer_times import LayerTimes
from pipeline.mesh import Mesh
from pipeline.plan import Plan
from pipeline.planning import planned_costs, state_bytes
from pipeline.runner import Runner
from pipeline.size_balance import SizeBalancer
from pipeline.timed import timed
from schedules import facts

__all__ = ["Balancer"]

_BYTES_PER_SECOND, _SECONDS = 5e8, 0.05
"""What a move is thought to take before one has been measured: what is sent, and building anew."""


class Balancer:
    """One rank's part in it.  All ranks heed one proposal, which the first makes.

    ``profile`` is what layers and ranks are believed to cost, None until something has been looked into; ``notes`` are
    all that it has said, oldest first.
    """

    def __init__(self, config: PipelineConfig, mesh: Mesh) -> None:
        self.profile: Profile | None = None
        self.notes: list[str] = []
        self._terms = Terms(config.balance_window, config.balance_gain, config.balance_horizon)
        self._times = LayerTimes(mesh.device, self._terms.window)
        self._alarm = Alarm(self._terms)
        self._first: list[dict[int, Seconds]] = []  # the first whole window of steps
        self._moved: tuple[Move, ...] = ()  # since the profile was believed
        self._slower = 1.0  # than was thought, as far as a move was measured
        self._spans: list[float] = []  # seconds of the steps since the last move
        self._told = ""  # the last proposal by which nothing was to move
        self._promised: Proposal | None = None  # of the last move, until it is known what came of it
        self._sizes = SizeBalancer(config) if config.balance_micro_batch == "auto" else None

    def watch(self, runner: Runner) -> None:
        """Look at the layers of this layout from now on."""
        losses = [stage.loss for stage in runner.stages.values() if stage.loss is not None]
        self._times.watch([*runner.built.layers.values(), *losses], runner.plan.partition.layers)
        self._alarm.reset()
        self._spans.clear()
        self._first.clear()
        if self._sizes is not None:
            self._sizes.reset()

    def stop(self) -> None:
        """Look at them no more."""
        self._times.stop()

    def forget_step(self) -> None:
        """The step was not applied."""
        self._times.forget()

    def after_step(
        self, closing: Closing, runner: Runner, config: PipelineConfig, mesh: Mesh, measured: Profile | None
    ) -> Plan | None:
        """The Plan by which layers are to move, where they are.  Collective if ranks are unevenly busy.

        ``measured`` is the profile from before training, where there is one.
        """
        self._times.end_step()
        self._spans.append(closing.span)
        self._look_back()
        busy = [max(closing.busy[mesh.world_rank(d, p)] for d in range(mesh.data)) for p in range(mesh.pipe)]
        if self._sizes is not None and self._sizes.due(busy, closing.span):
            plan = self._resized(self._sizes, runner, config, mesh, measured)
            if plan is not None:
                return plan
        if config.balance == "off" or (self._sizes is not None and not self._sizes.settled):
            return None
        rings, whole = self._alarm.rings(busy), len(self._times.steps) == self._terms.window
        if whole and not self._first:
            self._first = list(self._times.steps)
        if not rings or not whole:
            return None
        steps, first, sizes = self._gathered(runner, mesh)
        told = None
        if mesh.rank == 0:
            believed = self.profile or _begun(runner.plan, config, measured, first, sizes)
            told = self._proposal(believed, runner.plan, config, steps, sizes)
        proposal, plan = mesh.world.broadcast_object(told, 0)
        return self._heed(proposal, plan, config.balance == "on")

    def _resized(
        self, balancer: SizeBalancer, runner: Runner, config: PipelineConfig, mesh: Mesh, measured: Profile | None
    ) -> Plan | None:
        """The Plan with another number of micro-batches, if there is to be another.  Collective."""
        if len(self._times.steps) < self._terms.window:
            return None
        steps, _, sizes = self._gathered(runner, mesh)
        told = None
        if mesh.rank == 0:
            took = {layer: seconds for rank in medians(steps) for layer, seconds in rank.items()}
            plan = runner.plan
            base = _unmeasured(plan, sizes) if measured is None else planned_costs(config, plan, measured)
            told = balancer.decide(runner.plan, config, took, base)
        verdict: Verdict
        chosen: Plan
        verdict, chosen = mesh.world.broadcast_object(told, 0)
        self.notes += balancer.heed(verdict, config.rows or 1)
        self.profile, self._promised = None, None
        return None if verdict.why == "stay" else chosen

    def moved(self, seconds: float) -> None:
        """The layers have moved, which took so long on this rank."""
        if self._promised is not None:
            self._slower *= max(seconds, 1e-6) / self._promised.takes
            self.notes[-1] += f"; moving took {seconds:.3g} s"

    def _gathered(self, runner: Runner, mesh: Mesh) -> tuple[Steps, Steps, dict[int, int]]:
        """The last steps and the first, by rank of the pipeline, of each layer on its slowest copy; bytes of layers."""
        sizes = {held.layer: sum(v.parameters.nbytes for v in f.vectors) for held, f in runner.built.flats.items()}
        told = mesh.world.all_gather_object((list(self._times.steps), self._first, sizes))

        def by_rank(which: int) -> Steps:
            return [
                [_slowest([told[mesh.world_rank(d, p)][which][n] for d in range(mesh.data)]) for p in range(mesh.pipe)]
                for n in range(self._terms.window)
                if n < len(told[0][which])
            ]

        return by_rank(0), by_rank(1), {layer: size for *_, own in told for layer, size in own.items()}

    def _proposal(
        self, believed: Profile, plan: Plan, config: PipelineConfig, steps: Steps, sizes: Mapping[int, int]
    ) -> tuple[Proposal, Plan]:
        schedule, state = plan.build_schedule(), state_bytes(config, plan)

        def cut(profile: Profile) -> Partition:
            limit = config.memory_limit
            return make_partition(
                "profile", schedule, profile=profile, memory_cap=limit, state=None if limit is None else state
            )

        def move_seconds(moves: Moves) -> float:
            size = sum(sizes.get(move.layer, 0) for move in moves.moves)
            return self._slower * (_SECONDS + 3 * size / _BYTES_PER_SECOND)  # with two moments of the optimizer

        proposal = propose(
            believed,
            schedule,
            plan.partition,
            steps,
            cut,
            self._terms,
            move_seconds=move_seconds,
            moved=self._moved,
        )
        plan = replace(plan, cuts=proposal.partition.cuts)
        if proposal.verdict == "move" and "costs" in facts(plan.schedule).options:
            plan = timed(plan, schedule, proposal.profile, partial(_same, proposal.partition), free=False)
        return proposal, plan

    def _heed(self, proposal: Proposal, plan: Plan, act: bool) -> Plan | None:
        if proposal.verdict == "wait":
            return None
        self.profile, self._moved = proposal.profile, ()
        if proposal.verdict == "stay":
            self._alarm.settle()
            return None
        promise = f"a step should take {proposal.then:.4g} s instead of {proposal.now:.4g} s"
        where = proposal.moves.text().replace("\n", ", ")
        if not act:
            self._alarm.settle()
            if where != self._told:
                self.notes.append(f"balance: {proposal.reason}; with {where}, {promise} (report: nothing moves)")
            self._told = where
            return None
        self.notes.append(f"balance: {proposal.reason}; {where}; {promise}")
        self._promised, self._moved = proposal, proposal.moves.moves
        return plan

    def _look_back(self) -> None:
        """Say what came of a move, once as many steps have shown it as led to it."""
        if self._promised is not None and len(self._spans) == self._terms.window:
            promised, self._promised = self._promised, None
            now = statistics.median(self._spans)
            self.notes.append(
                f"balance: after the move a step takes {now:.4g} s; {promised.then:.4g} s were expected, "
                f"and it took {promised.now:.4g} s before"
            )


def _same(partition: Partition, _: object) -> Partition:
    return partition


def _slowest(copies: Sequence[Mapping[int, Seconds]]) -> dict[int, Seconds]:
    return {layer: max((copy[layer] for copy in copies), key=lambda took: took.total) for layer in copies[0]}


def _begun(
    plan: Plan, config: PipelineConfig, measured: Profile | None, first: Steps, sizes: Mapping[int, int]
) -> Profile:
    """What is believed at first: the profile, or what the first steps show, as if all ranks were alike."""
    if measured is not None:
        return planned_costs(config, plan, measured)
    return first_belief(_unmeasured(plan, sizes).layers, medians(first))


def _unmeasured(plan: Plan, sizes: Mapping[int, int]) -> Profile:
    """Layers of these sizes, that are not known to cost anything."""
    layers = [
        LayerCost(
            name=f"layers.{number}",
            type="",
            forward=0.0,
            input_grad=0.0,
            weight_grad=0.0,
            parameter_bytes=sizes.get(number, 0),
        )
        for number in range(plan.partition.layers)
    ]
    return Profile(layers=tuple(layers))
