"""What does it cost to split backward into I and W?  Transformer blocks by pipeloom, plain PyTorch and torch's split.

    python -m benchmarks.split_backward [--keep-freed-memory] [--json]

Eight micro-batches pass through a stage: forward and backward by PyTorch alone; forward and a full B; forward, I of all
layers and then W of all layers; and the same with the functions that torch's zero-bubble schedules call.  In turn, in
one process of one thread; medians of the rounds.  Bytes are what a micro-batch leaves alive between its I and its W.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torch_split

from benchmarks.ranks import Row, median, parser_of, report
from benchmarks.transformer import MLP, Attention
from pipeline.gradients import FlatLayer, Scratch, split
from pipeline.gradients.allocator import keep_freed_memory
from pipeline.layer import Layer, Place, RandomSource
from pipeline.shapes import Value
from pipeline.stage import Stage, StagePass

MICRO_BATCHES, ROUNDS = 8, 11


class Case(NamedTuple):
    """The shape of a stage, and the largest ratios that are allowed."""

    dim: int
    sequence: int
    rows: int
    blocks: int
    full: float
    deferred: float
    over_torch: float


CASES = (
    Case(64, 32, 1, 8, 1.10, 1.12, 0.55),
    Case(256, 128, 4, 4, 1.02, 1.05, 1.00),
    Case(512, 128, 1, 2, 0.97, 0.95, 0.90),
)

Pass = Callable[[Tensor, Tensor], object]
"""One micro-batch forward and backward; returns what it keeps for its W, where that has not run."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--keep-freed-memory", action="store_true", help="with the setting of that name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.keep_freed_memory:
        keep_freed_memory()
    return report([row for case in CASES for row in rows_of(case)], as_json=options.json, unit="ms")


def rows_of(case: Case) -> list[Row]:
    torch.manual_seed(0)
    x = [torch.randn(case.rows, case.sequence, case.dim) for _ in range(MICRO_BATCHES)]
    dy = [torch.randn_like(one) for one in x]
    passes = contenders(case)
    found: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(2 + ROUNDS):
        for name, run in passes.items():
            started = time.perf_counter()
            for one, gradient in zip(x, dy, strict=True):
                run(one, gradient)
            found[name].append(time.perf_counter() - started)
    ms = {name: median(times[2:]) * 1000 for name, times in found.items()}
    label = f"d {case.dim}, sequence {case.sequence}, {case.rows} a micro-batch:"
    alive = {name: bytes_between(case, name, x[0], dy[0]) / 1024 for name in ("I", "torch I")}
    return [
        Row(f"{label} B over plain", ms["B"], ms["plain"], case.full),
        Row(f"{label} I and W over plain", ms["I and W"], ms["plain"], case.deferred),
        Row(f"{label} I and W over torch's", ms["I and W"], ms["torch I and W"], case.over_torch),
        Row(f"{label} KiB between I and W over torch's", alive["I"], alive["torch I"], 0.5),
    ]


def contenders(case: Case) -> dict[str, Pass]:
    ours = stage_of(case)
    plain, torchs = (nn.Sequential(*blocks(case)) for _ in range(2))

    def plainly(x: Tensor, dy: Tensor) -> None:
        plain(x.detach().requires_grad_()).backward(dy)

    def fully(x: Tensor, dy: Tensor) -> None:
        backward(ours, x, dy, defer=False)

    def deferred(x: Tensor, dy: Tensor) -> None:
        ours.weight_gradients(backward(ours, x, dy, defer=True))

    def as_torch(x: Tensor, dy: Tensor) -> None:
        torch_split.stage_backward_weight(torchs.parameters(), torch_input_grad(torchs, x, dy))

    return {"plain": plainly, "B": fully, "I and W": deferred, "torch I and W": as_torch}


def blocks(case: Case) -> list[nn.Module]:
    return [nn.Sequential(Attention(case.dim), MLP(case.dim)) for _ in range(case.blocks)]


def stage_of(case: Case) -> Stage:
    """The blocks as layers of an engine's stage."""
    random = RandomSource(0, torch.device("cpu"), None)
    scratch, layers = Scratch(), []
    for index, module in enumerate(blocks(case)):
        flat = FlatLayer(module)
        binding = split(module, flat, scratch=scratch)
        flat.zero_gradients()
        layers.append(Layer(index, str(index), module, random, module=module, flat=flat, binding=binding))
    return Stage(0, layers, None)


def backward(stage: Stage, x: Tensor, dy: Tensor, *, defer: bool) -> StagePass:
    """Forward, and B or I."""
    passage = StagePass()
    stage.forward(Value([x], None, (True,)), Place.at(0, 0, 0), passage)
    stage.backward(passage, [dy], 1.0, defer=defer)
    return passage


def torch_input_grad(module: nn.Module, x: Tensor, dy: Tensor) -> object:
    """Forward and I as torch's runtime has them; what it keeps for W."""
    x = x.detach().requires_grad_()
    return torch_split.stage_backward_input([module(x)], [dy], [x], module.parameters())[1]


def bytes_between(case: Case, name: str, x: Tensor, dy: Tensor) -> int:
    """Bytes that were allocated from before the forward and are alive when I has ended."""
    stage, module = stage_of(case), nn.Sequential(*blocks(case))
    run: Pass = (
        (lambda x, dy: backward(stage, x, dy, defer=True))
        if name == "I"
        else (lambda x, dy: torch_input_grad(module, x, dy))
    )
    if name == "I":
        stage.weight_gradients(backward(stage, x, dy, defer=True))
    else:
        torch_split.stage_backward_weight(module.parameters(), torch_input_grad(module, x, dy))
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run(x, dy)
        gc.collect()
    alive = sum(event.self_cpu_memory_usage for event in profile.events())
    del kept
    return alive


if __name__ == "__main__":
    sys.exit(main())
