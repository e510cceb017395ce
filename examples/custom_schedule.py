"""A schedule of your own, in a file of your own: listed, checked, proved, drawn, and run with the bits of 1f1b.

4 ranks, 6 micro-batches: 0 is a forward, a the gradient of its input, A that of its weights.

    rank 0 | 0 1 2 3 . . . a 4 b 5 c . d . e . f A B C D E F
    rank 1 | . 0 1 2 . . a 3 b 4 c 5 d . e . f A B C D E F .
    rank 2 | . . 0 1 . a 2 b 3 c 4 d 5 e . f A B C D E F . .
    rank 3 | . . . 0 a 1 b 2 c 3 d 4 e 5 f A B C D E F . . .

It is 1F1B whose weight gradients wait until every input gradient is gone: on rank r the first p - r forwards, then the
gradient of an input and a forward in turns, then the products of the weights.  It idles (p - 1)(F + I), less than 1F1B
by (p - 1)W, and pays with memory: what W needs is kept until the end.

    python examples/custom_schedule.py                     # this file imports itself: its names are there
    pipeloom timeline --schedule weights-last --ranks 4    # from an installed package, see below

The engine, the command line and every check find a schedule once its module has been imported.  A package needs no
import: it names its module in its own pyproject.toml, and ``pipeloom`` imports that when a schedule is looked up:

    [project.entry-points."pipeloom.schedules"]
    mine = "custom_schedule"
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules import Action, Kind, Shape, build, facts, lower, prove, schedule, simulate
from schedules.views import text


@schedule("weights-last", splits_backward=True, peak=lambda ranks, stages_per_rank, micro_batches: micro_batches)
def weights_last(shape: Shape) -> Iterator[list[Action]]:
    """1F1B whose weight gradients come last: shorter than 1f1b, for the memory of gpipe."""
    m = shape.micro_batches
    for rank in range(shape.ranks):
        ahead = min(shape.ranks - rank, m)
        row = [Action(rank, Kind.F, i) for i in range(ahead)]
        for i in range(m):
            row.append(Action(rank, Kind.I, i))
            if i + ahead < m:
                row.append(Action(rank, Kind.F, i + ahead))
        yield row + [Action(rank, Kind.W, i) for i in range(m)]


RANKS, MICRO_BATCHES, STEPS = 4, 6, 5


def train(name: str) -> list[float]:
    """The losses of a small model, on the calling rank."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from pipeline import LayerSpec, PipelineModule, initialize

    layers = [LayerSpec(nn.Linear, 16, 16) if i % 2 == 0 else LayerSpec(nn.Tanh) for i in range(8)]
    module = PipelineModule([*layers, LayerSpec(nn.Linear, 16, 4)], F.cross_entropy)
    config = {"schedule": name, "micro_batches": MICRO_BATCHES, "partition": "parameters"}
    engine = initialize(module, config=config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(MICRO_BATCHES, 8, 16, generator=generator), torch.arange(8).remainder(4)
    losses = [engine.train_batch([(rows, y) for rows in x]).item() for _ in range(STEPS)]
    ran = engine.timeline().schedule.rows[engine.mesh.pipe_rank]
    if ran != build(name, ranks=RANKS, micro_batches=MICRO_BATCHES).rows[engine.mesh.pipe_rank]:
        raise RuntimeError(f"the engine ran {ran}")
    return losses


def main() -> None:
    from pipeline import run_local

    print(f"{facts('weights-last').name}: {facts('weights-last').doc}\n")
    timelines = []
    for name in ("1f1b", "weights-last"):
        made = build(name, ranks=RANKS, micro_batches=MICRO_BATCHES)  # checked: complete, legal, no circle
        prove(lower(made))  # once more: lower proves what it makes
        timeline = simulate(made)
        timelines.append(timeline)
        print(f"{name:14} step {timeline.step_time:4g}, peak {max(timeline.peak_activations):g} micro-batches")
    print(f"\n{text.draw(timelines[1], over=timelines[:1], unit='', width=100)}\n")
    losses = {name: run_local(train, RANKS, name)[0] for name in ("1f1b", "weights-last")}
    for name, found in losses.items():
        print(f"{name:14} " + " ".join(f"{loss:.6f}" for loss in found))
    print("the same bits" if losses["1f1b"] == losses["weights-last"] else "NOT the same bits")


if __name__ == "__main__":
    main()
