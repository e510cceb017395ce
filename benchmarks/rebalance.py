"""A rank becomes twice as slow while training runs: how soon do the layers lie where they should, and does that pay?

    python -m benchmarks.rebalance [--what sleeping gpt still sizes] [--json]

`sleeping`: 4 ranks of 4 layers, F = I = W = 4 ms each, 8 micro-batches; from step 20 on all layers of rank 1 take twice
as long.  `gpt`: 2 ranks, each on a core of its own, until at step 20 another process comes to the core of rank 1.
Within 10 steps a step must take at most 1.05 times what it takes with the cuts that the exact split gives for the true
speeds, which are measured afterwards, in turn; what the decision and the move took must be saved within 20 steps; and
the losses must have the same bits as those of a run that never moves.  `still`: with `balance = "report"` nothing
moves, nor does anything in 500 steps of sleeping layers whose times are off by up to a tenth.  `sizes`: with
`balance_micro_batch = "auto"`, on 4 ranks of layers that take a + b·rows, 64 rows a step: the size of micro-batches
after 10 steps, and again 10 steps after a and b have changed, over the best of all; losses beside those of a fixed
size in fp64; and with a memory cap the largest size over what it allows.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.ranks import Row, finish, median, parser_of, report, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.contenders import Problem
    from pipeline.engine import Engine

BEFORE, ADAPTING, AFTER = 20, 10, 10
"""Steps at full speed, steps in which layers must have moved, and steps that are timed then."""
SLOW_RANK, FACTOR = 1, 2.0
SECONDS = 0.004
WHAT = {"sleeping": 4, "gpt": 2, "still": 4, "sizes": 4}
"""What there is to measure, with its number of ranks."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    options = parser.parse_args()
    if options.worker:
        {"sleeping": sleeping, "gpt": pinned, "still": still, "sizes": sizes}[options.what[0]]()
        return 0
    rows = []
    for what in options.what:
        found = run_ranks("benchmarks.rebalance", WHAT[what], ["--what", what], timeout=1200)
        for note in found.pop("notes"):
            print(note, file=sys.stderr)
        rows += [Row(f"{what}: {name}", *numbers) for name, numbers in found.items()]
    return report(rows, as_json=options.json, unit="")


class Pace:
    """What the steps have come to, for layers that look at it."""

    step = 0


def sleeping() -> None:
    import torch

    from benchmarks.contenders import Problem
    from benchmarks.sleeping_layers import wake_exactly

    wake_exactly()

    def factor() -> float:
        return FACTOR if Pace.step >= BEFORE and int(os.environ["RANK"]) == SLOW_RANK else 1.0

    layers = [partial(paced_layer, factor, last=n == 15) for n in range(16)]
    batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    task = Problem(layers, _square, batch, batch, 8, partial(torch.optim.Adam, lr=0.01))
    speeds = [1 / FACTOR if rank == SLOW_RANK else 1.0 for rank in range(4)]
    adapt(task, speeds, ready=lambda: None)


def pinned() -> None:
    import torch

    from benchmarks.contenders import Problem
    from benchmarks.sleeping_layers import stay_on_a_core
    from benchmarks.transformer import cross_entropy, gpt

    rank = int(os.environ["RANK"])
    stay_on_a_core(rank)
    others: list[subprocess.Popen[bytes]] = []

    def share_the_core() -> None:
        if rank == SLOW_RANK:  # a child stays on the core of its parent
            others.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        time.sleep(0.5)

    batch = torch.randint(256, (32, 129), generator=torch.Generator().manual_seed(0))
    layers = gpt(8, 128, 128, 256)
    task = Problem(layers, cross_entropy, batch[:, :-1], batch[:, 1:], 8, partial(torch.optim.AdamW, lr=1e-3))
    try:
        adapt(task, [1.0, 1 / FACTOR], ready=share_the_core)
    finally:
        for process in others:
            process.kill()


def adapt(task: Problem, speeds: Sequence[float], ready: Callable[[], None]) -> None:
    """Train, slow a rank down at step ``BEFORE``, by ``ready`` or as ``Pace`` says, and measure what comes of it."""
    from benchmarks.contenders import of_pipeloom
    from partition import make_partition

    Pace.step = 0
    engine = of_pipeloom(task, balance="on")
    losses, _ = steps_of(engine, task, BEFORE)
    ready()
    adapting, walls = steps_of(engine, task, ADAPTING)
    moved, _ = steps_of(engine, task, AFTER)
    assert engine.balancer is not None
    assert engine.profile is not None
    true = engine.profile.model_copy(update={"speeds": tuple(speeds)})
    best = make_partition("profile", engine.schedule, profile=true).cuts
    found, notes = engine.plan.cuts, engine.balancer.notes
    engine.relayout(balance="off")
    programs: dict[tuple[int, ...], list[float]] = {found: [], best: []}
    for _ in range(6):  # in turn
        for cuts, taken in programs.items():
            engine.relayout(partition=cuts)
            steps_of(engine, task, 1)
            for _ in range(2):
                steps_of(engine, task, 1)
                taken.append(engine.stats.seconds if engine.stats else 0.0)
    now, expected = median(programs[found]), median(programs[best])
    slow = walls[1:3]  # of steps that are slow, before anything has moved
    lost = max(walls) - median(slow)
    saved = max(20 * (median(slow) - now), 1e-9)
    Pace.step = 0
    still = of_pipeloom(task)
    unmoved = [loss for count in (BEFORE, ADAPTING, AFTER) for loss in steps_of(still, task, count)[0]]
    differing = sum(a != b for a, b in zip([*losses, *adapting, *moved], unmoved, strict=True))
    finish(
        {
            "step after 10 steps over the step with the best cuts": (now, expected, 1.05),
            "seconds lost to deciding and moving, over what 20 steps save": (lost, saved, 1.0),
            "losses that differ from those of a run that never moves, plus 1": (1 + differing, 1, 1.0),
            "notes": [f"cuts {found}, the best are {best}", *notes],
        }
    )


def sizes() -> None:
    from benchmarks import balanced_sizes

    balanced_sizes.sizes()


def steps_of(engine: Engine, task: Problem, count: int) -> tuple[list[float], list[float]]:
    """The losses of so many steps on the same data, and the seconds of each."""
    losses, seconds = [], []
    for _ in range(count):
        started = time.perf_counter()
        losses.append(engine.train_batch(task.items()).item())
        seconds.append(time.perf_counter() - started)
        Pace.step += 1
    return losses, seconds


def still() -> None:
    import torch

    from benchmarks.contenders import Problem, of_pipeloom
    from benchmarks.sleeping_layers import wake_exactly

    wake_exactly()
    draw = random.Random(int(os.environ["RANK"]))
    noisy: dict[str, Any] = {"step": -1, "factor": 1.0}

    def factor() -> float:
        if noisy["step"] != Pace.step:  # a rank is as slow all through a step
            noisy.update(step=Pace.step, factor=draw.uniform(0.9, 1.1))
        return float(noisy["factor"])

    layers = [partial(paced_layer, factor, last=n == 15, seconds=0.0005) for n in range(16)]
    batch = torch.zeros(32, 8)
    task = Problem(layers, lambda output, _: output, batch, batch, 8)
    Pace.step = 0
    engine = of_pipeloom(task, balance="on", partition="uniform")
    steps_of(engine, task, 500)
    moves = [note for note in engine.balancer.notes if "->" in note] if engine.balancer else []
    slow = FACTOR if int(os.environ["RANK"]) == SLOW_RANK else 1.0
    layers = [partial(paced_layer, lambda: slow, last=n == 15, seconds=0.001) for n in range(16)]
    told = of_pipeloom(task._replace(layers=layers), balance="report", partition="uniform")
    steps_of(told, task, 20)
    changed = told.plan.cuts != (0, 4, 8, 12, 16)
    silent = not (told.balancer and told.balancer.notes)
    finish(
        {
            "moves in 500 steps of noise, plus 1": (1 + len(moves), 1, 1.0),
            "moved, or told nothing, with report, plus 1": (1 + changed + silent, 1, 1.0),
            "notes": [*moves, *(told.balancer.notes if told.balancer else [])],
        }
    )


def _square(output: Tensor, _: Tensor) -> Tensor:
    return (output / 1000) ** 2


def paced_layer(factor: Callable[[], float], *, last: bool, seconds: float = SECONDS) -> Any:
    """A linear layer that takes so many seconds for each of F, I and W, times the factor of the moment."""
    import torch

    from benchmarks.sleeping_layers import Sleep

    class Paced(Sleep):
        def forward(self, x: Tensor) -> Tensor:
            self.times = (seconds * factor(),) * 3
            return super().forward(self.mixed(x))

        def __init__(self) -> None:
            super().__init__(seconds, seconds, seconds, last=last)
            self.mixed = torch.nn.Linear(8, 8)

    return Paced()


if __name__ == "__main__":
    sys.exit(main())
