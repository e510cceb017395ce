"""What a step of small linear stages takes with nothing but its tensors and its messages: no runtime at all.

    python -m benchmarks.floor [--ranks 2] [--json]

The same program that pipeloom runs, written out by hand for stages that are one linear layer: buffers are there before
the step, every receive is posted when it begins, and torch.distributed's isend and irecv are called bare.  No shapes
are looked at, no failure is looked for, nothing is stamped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, distributed, nn

from benchmarks.contenders import Problem, Step, in_turn
from benchmarks.ranks import Row, finish, median, parser_of, report, run_ranks
from schedules import Action, Kind, Op, Schedule, build, lower

WIDTH, ROWS, MICRO_BATCHES = 8, 4, 64
SCHEDULES = {"1f1b": 1, "interleaved-1f1b": 2, "zb-v": 2}
"""The schedules that are compared, with the stages that each rank holds."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        worker(options.ranks)
        return 0
    found = run_ranks("benchmarks.floor", options.ranks, ["--ranks", str(options.ranks)])
    rows = [Row(f"{name} p{options.ranks}: with messages, without", *pair, None) for name, pair in found.items()]
    return report(rows, as_json=options.json, unit="µs an action")


def worker(ranks: int) -> None:
    distributed.init_process_group("gloo")
    found = {}
    for name, stages in SCHEDULES.items():
        schedule = build(name, ranks=ranks, micro_batches=MICRO_BATCHES, stages_per_rank=stages)
        steps = {str(messages): bare(problem(schedule), schedule, messages=messages) for messages in (True, False)}
        in_turn(steps, rounds=2)
        times = in_turn(steps, rounds=7, repeat=3)
        found[name] = [median(taken) / actions_of_a_rank(schedule) * 1e6 for taken in times.values()]
    finish(found)


def problem(schedule: Schedule) -> Problem:
    """One linear layer of width 8 a stage."""
    layers = [partial(nn.Linear, WIDTH, WIDTH)] * schedule.num_stages
    batch = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
    return Problem(layers, nn.functional.mse_loss, batch, torch.randn_like(batch), MICRO_BATCHES)


def actions_of_a_rank(schedule: Schedule) -> int:
    return max(len(row) for row in schedule.rows)


def bare(problem: Problem, schedule: Schedule, *, messages: bool = True) -> Step:
    """A step of this rank; without ``messages`` what would arrive is there already."""
    rank, program = distributed.get_rank(), lower(schedule)
    hands = _Hands(problem, schedule, rank)
    arriving = [
        (target, peer, tag)
        for peer in range(schedule.ranks)
        for tag, lane in enumerate(("F", "B"))
        for _, target in program.lane(peer, rank, lane)  # type: ignore[arg-type]
    ]
    code: list[tuple[Callable[[], object], Action | None, tuple[int, int, Action] | None]] = []
    for op, action, peer, _ in program.rows[rank]:
        if op in (Op.F, Op.B, Op.I, Op.W):
            code.append((hands.compute(action), action if action in hands.arriving else None, None))
        elif op in (Op.SEND_F, Op.SEND_B):
            code.append((_nothing, None, (peer, int(op is Op.SEND_B), action)))

    def step() -> None:
        hands.begin()
        pending, sent = {}, []
        if messages:
            pending = {
                target: distributed.irecv(hands.arriving[target], peer, tag=tag) for target, peer, tag in arriving
            }
        for run, needs, sends in code:
            if needs is not None and messages:
                pending[needs].wait()
            run()
            if sends is not None and messages:
                peer, tag, action = sends
                sent.append(distributed.isend(hands.leaving.pop(action), peer, tag=tag))
        for work in sent:
            work.wait()
        hands.update()

    return step


def _nothing() -> None:
    pass


class _Hands:
    """The tensors of a rank's stages.  A full backward is autograd's; where W is apart, its two products are here."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        own = schedule.stages_of_rank(rank)
        self.layers = {stage: problem.layers[stage]() for stage in own}
        self.parameters = [p for layer in self.layers.values() for p in layer.parameters()]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.inputs = problem.inputs.chunk(problem.micro_batches)
        self.targets = problem.targets.chunk(problem.micro_batches)
        self.loss, self.share = problem.loss, 1 / problem.micro_batches
        self.optimizer = problem.optimizer(self.parameters)
        rows = {action for row in schedule.rows for action in row}
        self.split = any(action.kind is Kind.W for action in rows)
        place = schedule.rank_of_stage
        self.arriving = {
            action: torch.zeros_like(self.inputs[0])
            for action in schedule.rows[rank]
            if action.kind is not Kind.W and (source := self.source(action)) is not None and place[source] != rank
        }
        self.leaving: dict[Action, Tensor] = {}
        self.local: dict[tuple[bool, int, int], Tensor] = {}
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def source(self, action: Action) -> int | None:
        """The stage whose result an F, B or I takes in."""
        find = self.schedule.previous_stage if action.kind is Kind.F else self.schedule.next_stage
        return find(action.stage, action.micro_batch)

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad.zero_()  # type: ignore[union-attr]

    def update(self) -> None:
        self.optimizer.step()

    def compute(self, action: Action) -> Callable[[], None]:
        stage, kind, micro_batch = action
        run = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.input_grad, Kind.W: self.weight_grad}[kind]
        return partial(run, action, stage, micro_batch)

    def take(self, action: Action) -> Tensor:
        found = self.arriving.get(action)
        key = (action.kind is Kind.F, action.stage, action.micro_batch)
        return self.local.pop(key) if found is None else found

    def hand_on(self, action: Action, stage: int | None, result: Tensor) -> None:
        if stage in self.layers:
            self.local[action.kind is Kind.F, stage, action.micro_batch] = result
        else:
            self.leaving[action] = result

    def forward(self, action: Action, stage: int, micro_batch: int) -> None:
        x = self.inputs[micro_batch] if stage == 0 else self.take(action).detach()
        if self.split:
            with torch.no_grad():
                y = self.layers[stage](x)
        else:
            y = self.layers[stage](x.requires_grad_(stage != 0))
        following = self.schedule.next_stage(stage, micro_batch)
        self.kept[stage, micro_batch] = x, y
        if following is not None:
            self.hand_on(action, following, y.detach())
        elif self.split:
            self.loss(y.requires_grad_(), self.targets[micro_batch]).mul(self.share).backward()
        else:
            self.kept[stage, micro_batch] = x, self.loss(y, self.targets[micro_batch]).mul(self.share)

    def backward(self, action: Action, stage: int, micro_batch: int) -> None:
        if self.split:
            self.input_grad(action, stage, micro_batch)
            self.weight_grad(action, stage, micro_batch)
            return
        x, y = self.kept.pop((stage, micro_batch))
        y.backward(None if y.dim() == 0 else self.take(action))
        if stage:
            assert x.grad is not None
            self.hand_on(action, self.schedule.previous_stage(stage, micro_batch), x.grad)

    def input_grad(self, action: Action, stage: int, micro_batch: int) -> None:
        x, y = self.kept[stage, micro_batch]
        following = self.schedule.next_stage(stage, micro_batch)
        dy = y.grad if following is None else self.take(action)
        assert dy is not None
        self.kept[stage, micro_batch] = x, dy
        if stage:
            dx = dy.mm(self.layers[stage].weight.data)
            self.hand_on(action, self.schedule.previous_stage(stage, micro_batch), dx)

    def weight_grad(self, action: Action, stage: int, micro_batch: int) -> None:
        x, dy = self.kept.pop((stage, micro_batch))
        layer = self.layers[stage]
        layer.weight.grad.addmm_(dy.t(), x)
        layer.bias.grad.add_(dy.sum(0))


if __name__ == "__main__":
    sys.exit(main())
