"""Is `auto` the shortest also when it runs?  Layers that sleep, unlike each other, on ranks of which one is slow.

    python -m benchmarks.auto [--steps 7] [--json]

12 layers on 4 ranks, of which rank 2 takes half as long again for everything, and 12 micro-batches.  All schedules
get the costs that the engine's own profiler measures, the speeds of the ranks among them.  Of those by name that hold
no more activations, the four with the shortest step by simulation run beside `auto`, a step of each in turn.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.ranks import Row, median, parser_of, report, run_ranks

if TYPE_CHECKING:
    from torch import nn

    from partition import Profile

RANKS, SLOW_RANK, SLOWER = 4, 2, 1.5
MICRO_BATCHES = 12
FORWARD = (5, 9, 6, 7, 10, 4, 8, 6, 9, 5, 7, 6)  # milliseconds
INPUT_GRAD, WEIGHT_GRAD = 1.1, 0.8  # of forward
NAMED = 4


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each schedule (default 7)")
    options = parser.parse_args()
    if options.worker:
        worker(options.steps)
        return 0
    found = run_ranks("benchmarks.auto", RANKS, ["--steps", str(options.steps)])
    if not options.json:
        print("speeds by the profile: " + (", ".join(f"{s:.3f}" for s in found["speeds"]) or "all alike"))
    return report(rows_of(found["steps"]), as_json=options.json, unit="s")


def rows_of(found: dict[str, dict[str, float]]) -> list[Row]:
    """What is to be shown of the measured and simulated step of ``auto`` and of each schedule by name."""
    found = dict(found)
    ours = found.pop("auto")
    best = min(found, key=lambda name: found[name]["measured"])
    return [
        Row("auto over its simulation", ours["measured"], ours["simulated"], 1.03),
        *(Row(f"{name} over its simulation", one["measured"], one["simulated"], None) for name, one in found.items()),
        Row(f"auto over {best}, the best measured by name", ours["measured"], found[best]["measured"], 1.0),
        Row(f"auto over {best}, both simulated", ours["simulated"], found[best]["simulated"], 1.0),
    ]


def sleeper(milliseconds: float, last: bool) -> nn.Module:
    """A layer that takes longer where it is built on the slow rank."""
    from benchmarks.sleeping_layers import Sleep

    forward = milliseconds / 1000 * (SLOWER if int(os.environ["RANK"]) == SLOW_RANK else 1.0)
    return Sleep(forward, INPUT_GRAD * forward, WEIGHT_GRAD * forward, last=last)


def worker(steps: int) -> None:
    import torch

    from benchmarks.sleeping_layers import stay_on_a_core, wake_exactly
    from pipeline import LayerSpec, PipelineModule, initialize

    wake_exactly()
    stay_on_a_core(int(os.environ["RANK"]))
    layers = [LayerSpec(sleeper, ms, index == len(FORWARD) - 1) for index, ms in enumerate(FORWARD)]
    module = PipelineModule(layers, loss_fn=lambda output, target: output)
    items = itertools.repeat((torch.zeros(4, 8), None))
    config = {"micro_batches": MICRO_BATCHES, "partition": "profile"}
    ours = initialize(module, config={**config, "schedule": "auto"}, optimizer=torch.optim.SGD)
    ours.train_batch(items)
    engines = {"auto": ours}
    assert ours.profile is not None
    for name, stages in best_by_name(ours.profile):
        settings = {**config, "schedule": name, "stages_per_rank": stages}
        engine = initialize(module, config=settings, optimizer=torch.optim.SGD, profile=ours.profile)
        engine.train_batch(items)
        engines[f"{name}:{stages}"] = engine
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(steps):
        for name, engine in engines.items():
            engine.mesh.world.barrier()
            engine.train_batch(items)
            times[name].append(engine.timeline().step_time)
    if ours.mesh.rank == 0:
        found = {
            name: {"measured": median(times[name]), "simulated": engine.predicted_timeline().step_time}
            for name, engine in engines.items()
        }
        print(json.dumps({"speeds": ours.profile.speeds, "steps": found}))


def best_by_name(profile: Profile) -> list[tuple[str, int]]:
    """Names and stages a rank of the shortest schedules by simulation that keep at most one micro-batch a rank."""
    import schedules
    from partition import make_partition, predict_timeline, stage_costs

    found = []
    for name, stages in itertools.product(schedules.names(), (1, 2, 3)):
        if name == "auto" or not schedules.facts(name).stages_per_rank.allow(stages):
            continue
        build = partial(schedules.build, name, ranks=RANKS, micro_batches=MICRO_BATCHES, stages_per_rank=stages)
        try:
            made = build()
        except schedules.errors.ImpossibleShape:
            continue
        if made.forward_only or len(made.routes) > 1:  # a second copy of the weights is memory too
            continue
        cuts = make_partition("profile", made, profile=profile)
        if "costs" in schedules.facts(name).options:
            made = build(costs=stage_costs(profile, cuts, made))
        timeline = predict_timeline(profile, cuts, made)
        if max(timeline.peak_activations) <= RANKS + 1e-9:
            found.append((timeline.step_time, name, stages))
    return [(name, stages) for _, name, stages in sorted(found)[:NAMED]]


if __name__ == "__main__":
    sys.exit(main())
