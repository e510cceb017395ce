"""Is `auto` the fastest when it runs? Four ranks of sleeping layers, rank 2 of which takes 1.5 times as long.

    python -m benchmarks.auto [--micro-batches 12] [--rounds 7] [--json]

Twelve unlike layers are measured by the engine's own profiler, cut for each schedule by what it found, and run under
one cap, the activations of 1.5 times as many micro-batches as there are ranks: `auto`, and those four schedules by
name that are the shortest by simulation of all that fit. They take turns in the same processes; medians are compared.
Nothing is fitted: what is simulated is the profile. `auto` keeps the last stage where it was when the data was read,
so it is made on both places, rank 3 and, in waves, rank 0, and the shorter of the two by simulation is `auto`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.ranks import Row, median, report, run_ranks

if TYPE_CHECKING:
    from partition import Profile
    from pipeline import PipelineModule

RANKS, SLOW_RANK, SLOWER = 4, 2, 1.5
CAP = 1.5 * RANKS
NAMED = 4
FORWARD = (6.0, 8.5, 5.0, 7.0, 4.7, 8.0, 5.5, 6.5, 8.7, 4.8, 7.5, 5.8)
"""Milliseconds of each layer; three of them are 14 to 26 ms, a stage of one a rank."""
INPUT_GRAD = (1.0, 1.3, 1.1, 1.4, 1.2, 1.0)
"""In shares of the forward, the layers in turn."""
WEIGHT_GRAD = (0.9, 0.6, 1.0, 0.7, 0.5)
SIMULATED_BAR, NAMED_BAR = 1.03, 1.0


class Choice(NamedTuple):
    """A schedule by name, with how it is asked for."""

    name: str
    stages_per_rank: int | None = None
    options: tuple[tuple[str, float | str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{self.stages_per_rank}" if self.stages_per_rank else self.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.micro_batches, options.rounds)
        return 0
    arguments = ["--micro-batches", str(options.micro_batches), "--rounds", str(options.rounds)]
    found = run_ranks("benchmarks.auto", RANKS, arguments)
    if not options.json:
        speeds = ", ".join(f"{speed:.3f}" for speed in found["speeds"]) or "all alike"
        print(f"speeds measured: {speeds}; a hop: {1e6 * found['hop']:.0f} us; `auto` is {found['found']}")
    return report(rows_of(found["steps"]), as_json=options.json, unit="s")


def rows_of(steps: dict[str, tuple[float, float]]) -> list[Row]:
    """What is shown of the measured and the simulated step of each schedule, ``auto`` the first."""
    auto, *named = steps
    rows = [
        Row(f"{name}, measured over simulated", *steps[name], SIMULATED_BAR if name == auto else float("inf"))
        for name in steps
    ]
    best = min(named, key=lambda name: steps[name][0])
    return [*rows, Row(f"auto over the best by name, {best}, measured", steps[auto][0], steps[best][0], NAMED_BAR)]


def worker(micro_batches: int, rounds: int) -> None:
    import torch

    from benchmarks.sleeping_layers import be_slower, stay_on_a_core, wake_exactly
    from pipeline import initialize
    from pipeline.engine import Engine

    rank = int(os.environ["RANK"])
    wake_exactly()
    stay_on_a_core(rank)
    if rank == SLOW_RANK:
        be_slower(SLOWER)
    items = itertools.repeat((torch.zeros(4, 8), None))

    def engine_for(choice: Choice, profile: Profile | None) -> Engine:
        config = {
            "schedule": choice.name,
            "schedule_options": dict(choice.options),
            "stages_per_rank": choice.stages_per_rank,
            "micro_batches": micro_batches,
            "partition": "profile",
            "profile_runs": 7,
        }
        made = initialize(layers(), config=config, optimizer=torch.optim.SGD, profile=profile)
        made.train_batch(items)
        return made

    cap = ("memory_cap", CAP)
    first = engine_for(Choice("auto", None, (cap,)), None)
    profile = first.profile
    back = engine_for(Choice("auto", 2, (cap, ("placement", "wave"))), profile)
    auto = min((first, back), key=lambda engine: engine.predicted_timeline().step_time)
    world = auto.mesh.world
    others = world.broadcast_object(shortest(profile, micro_batches) if rank == 0 else None, 0)
    engines = {"auto": auto, **{str(choice): engine_for(choice, profile) for choice in others}}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _, (name, engine) in itertools.product(range(rounds), engines.items()):
        world.barrier()
        engine.train_batch(items)
        times[name].append(engine.timeline().step_time)
    steps = {name: (median(times[name]), engines[name].predicted_timeline().step_time) for name in engines}
    if rank == 0:
        made = auto.schedule
        placement = dict(auto.plan.schedule_options)["placement"]
        text = f"{placement} of {made.stages_per_rank} stages a rank, layers {auto.plan.partition}"
        print(json.dumps({"steps": steps, "speeds": profile.speeds, "hop": profile.hop, "found": text}))


def layers() -> PipelineModule:
    """Layers that sleep, with F, I and W in ratios of their own."""
    from benchmarks.sleeping_layers import Sleep
    from pipeline import LayerSpec, PipelineModule

    shares = zip(FORWARD, itertools.cycle(INPUT_GRAD), itertools.cycle(WEIGHT_GRAD))  # noqa: B905 - cycles have no end
    times = [tuple(forward * share / 1000 for share in (1.0, i, w)) for forward, i, w in shares]
    specs = [LayerSpec(Sleep, *time, last=number == len(times) - 1) for number, time in enumerate(times)]
    return PipelineModule(specs, loss_fn=lambda output, target: output)


def shortest(profile: Profile, micro_batches: int) -> list[Choice]:
    """The shortest schedules by name, by simulation, of those with one copy of the layers that fit the cap."""
    found: list[tuple[float, Choice]] = []
    for choice in every(len(profile.layers)):
        seconds = simulated(profile, choice, micro_batches)
        if seconds is not None:
            found.append((seconds, choice))
    return [choice for _, choice in sorted(found)[:NAMED]]


def every(layers: int) -> list[Choice]:
    """All schedules by name, with each number of stages a rank that there are layers for."""
    import schedules

    known = {name: schedules.facts(name) for name in schedules.names()}
    return [
        Choice(name, stages)
        for name, facts in known.items()
        for stages in range(1, layers // RANKS + 1)
        if not facts.chooses and facts.stages_per_rank.allow(stages)
    ]


def simulated(profile: Profile, choice: Choice, micro_batches: int) -> float | None:
    """The simulated step; None for a schedule that does not fit or is none of those compared here."""
    import schedules
    from partition import make_partition, predict_timeline, stage_costs

    def build(**options: object) -> schedules.Schedule:
        return schedules.build(
            choice.name,
            ranks=RANKS,
            micro_batches=micro_batches,
            stages_per_rank=choice.stages_per_rank,
            **options,
        )

    try:
        made = build()
    except schedules.errors.ScheduleError:
        return None
    if made.forward_only or made.num_layer_groups < len(made.rank_of_stage):
        return None
    cut = make_partition("profile", made, profile=profile)
    if "costs" in schedules.facts(choice.name).options:
        made = build(costs=stage_costs(profile, cut, made))
    timeline = predict_timeline(profile, cut, made)
    if max(timeline.peak_activations) > CAP + 1e-9:
        return None
    return timeline.step_time


if __name__ == "__main__":
    sys.exit(main())
