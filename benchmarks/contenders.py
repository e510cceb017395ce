"""The same training step by pipeloom, by torch.distributed.pipelining and by DeepSpeed, each behind one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from partition import Profile
from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.engine import Engine
from schedules import Schedule

Make = Callable[[], nn.Module]
Step = Callable[[], object]

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""torch's names of the schedules that it has too."""


class Problem(NamedTuple):
    """What every contender trains: layers, the mean loss over a micro-batch, and a batch to be cut into equal parts."""

    layers: Sequence[Make]
    loss: Callable[[Tensor, Any], Tensor]
    inputs: Tensor
    targets: Tensor
    micro_batches: int
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.0)

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches over and over."""
        parts = zip(self.inputs.chunk(self.micro_batches), self.targets.chunk(self.micro_batches), strict=True)
        return itertools.cycle(list(parts))


def of_pipeloom(problem: Problem, *, profile: Profile | None = None, **settings: Any) -> Engine:
    """An engine that has not run yet; its step is ``train_batch(problem.items())``."""
    module = PipelineModule([LayerSpec(make) for make in problem.layers], loss_fn=problem.loss)
    config = {"micro_batches": problem.micro_batches, **settings}
    return initialize(module, config=config, optimizer=problem.optimizer, profile=profile)


def of_torch(problem: Problem, schedule: Schedule, cuts: Sequence[int]) -> Step:
    """A step of torch's runtime by the schedule of the same name, with stages on the same ranks, cut alike."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    rank, last = distributed.get_rank(), schedule.num_stages - 1
    own = schedule.stages_of_rank(rank)
    modules = [nn.Sequential(*(make() for make in problem.layers[cuts[s] : cuts[s + 1]])) for s in own]
    stages = [
        pipelining.PipelineStage(module, stage, schedule.num_stages, torch.device("cpu"))
        for module, stage in zip(modules, own, strict=True)
    ]
    kind = get_schedule_class(TORCH_NAMES[schedule.name])
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    runner = kind(given, problem.micro_batches, loss_fn=problem.loss)
    optimizer = problem.optimizer([p for module in modules for p in module.parameters()])
    inputs = (problem.inputs,) if 0 in own else ()
    targets = problem.targets if last in own else None

    def step() -> None:
        optimizer.zero_grad()
        runner.step(*inputs, target=targets, return_outputs=False)
        optimizer.step()

    return step


def of_deepspeed(problem: Problem, cuts: Sequence[int]) -> Step | None:
    """A step of DeepSpeed's pipeline, which has 1F1B only, cut alike; None where it is not installed."""
    try:
        import deepspeed
        from deepspeed.pipe import PipelineModule as DeepSpeedModule
    except ImportError:
        return None
    ranks = distributed.get_world_size()
    stages = [nn.Sequential(*(make() for make in problem.layers[cuts[s] : cuts[s + 1]])) for s in range(ranks)]
    deepspeed.init_distributed("gloo")
    model = DeepSpeedModule(
        stages, num_stages=ranks, loss_fn=problem.loss, partition_method="uniform", activation_checkpoint_interval=0
    )
    settings = {
        "train_micro_batch_size_per_gpu": len(problem.inputs) // problem.micro_batches,
        "gradient_accumulation_steps": problem.micro_batches,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=problem.optimizer(model.parameters()), config=settings)
    return partial(engine.train_batch, problem.items())


def in_turn(steps: Mapping[str, Step], *, rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Seconds of a step of each, on its slowest rank, one after the other in every round."""
    import time

    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            distributed.barrier()
            started = time.perf_counter()
            for _ in range(repeat):
                step()
            took = torch.tensor((time.perf_counter() - started) / repeat, dtype=torch.float64)
            distributed.all_reduce(took, distributed.ReduceOp.MAX)
            found[name].append(float(took))
    return found
