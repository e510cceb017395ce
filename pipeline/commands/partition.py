"""``pipeloom partition``: what each layer costs, where each schedule would cut, and which is the fastest."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import schedules
from partition import Partition, PartitionError, Profile, make_partition, predict_timeline, stage_costs
from pipeline.commands import loading
from pipeline.commands.shared import positive
from pipeline.errors import PipelineError
from schedules import Timeline
from schedules.candidates import rules_for
from schedules.errors import ScheduleError

bad_input = (loading.CannotLoad, PipelineError, PartitionError, ScheduleError, OSError)

_TRIED_STAGES = (1, 2, 3, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_model(parser)
    parser.add_argument("--ranks", type=positive, required=True, metavar="P", help="pipeline ranks to cut for")
    parser.add_argument(
        "--micro-batches", type=positive, default=8, metavar="M", help="micro-batches in a step (default 8)"
    )
    parser.add_argument(
        "--method", default="profile", help="how to cut: profile (default), parameters, uniform, or type:REGEX"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="use this saved profile in place of measuring")
    parser.add_argument("--save-profile", type=Path, metavar="FILE", help="save what was measured, for --profile")
    parser.add_argument("--hop", type=float, default=None, metavar="SECONDS", help="time of a message between ranks")
    parser.add_argument("--json", action="store_true", help="write everything as JSON")


@dataclass(frozen=True, slots=True)
class Option:
    """One schedule, with the cuts that suit it and what they would bring."""

    name: str
    stages_per_rank: int
    partition: Partition
    timeline: Timeline


def run(options: argparse.Namespace) -> int:
    if options.profile:
        profile = Profile.load(options.profile)
    else:
        profile = loading.measure(options, loading.load_model(options))
    if options.hop is not None:
        profile = profile.model_copy(update={"hop": options.hop})
    if options.save_profile:
        profile.save(options.save_profile)
    found = _options(profile, options)
    if not found:
        raise PartitionError(
            f"{len(profile.layers)} layers cannot be cut for {options.ranks} ranks; "
            f"set --ranks to {len(profile.layers)} or less"
        )
    if options.json:
        everything = {"profile": profile.model_dump(), "schedules": [_as_json(option) for option in found]}
        sys.stdout.write(json.dumps(everything, indent=2) + "\n")
    else:
        _write_tables(profile, found)
    return 0


def _options(profile: Profile, options: argparse.Namespace) -> list[Option]:
    """Every schedule that can be built for this shape, at each number of stages a rank, the fastest first."""
    found = []
    for name in schedules.names():
        facts = schedules.facts(name)
        for stages in (n for n in _TRIED_STAGES if facts.stages_per_rank.allow(n)):
            try:
                schedule = schedules.build(
                    name, ranks=options.ranks, micro_batches=options.micro_batches, stages_per_rank=stages
                )
            except schedules.errors.ImpossibleShape:
                continue
            if schedule.forward_only or schedule.num_layer_groups > len(profile.layers):
                continue
            cut = make_partition(options.method, schedule, profile=profile)
            if "costs" in facts.options:
                costs = stage_costs(profile, cut, schedule)
                placed = {"placement": _placement(schedule)} if facts.chooses else {}
                schedule = schedules.build(
                    name, ranks=options.ranks, micro_batches=options.micro_batches, stages_per_rank=stages,
                    costs=costs, **placed,
                )  # fmt: skip
            found.append(Option(name, stages, cut, predict_timeline(profile, cut, schedule)))
    return sorted(found, key=lambda option: option.timeline.step_time)


def _placement(schedule: schedules.Schedule) -> str:
    """The name of the placement that a schedule has."""
    ranks, stages = schedule.ranks, schedule.stages_per_rank
    rules = rules_for(ranks, stages)
    return next(rule.__name__ for rule in rules if rule(ranks, stages).rank_of_stage == schedule.rank_of_stage)


def _as_json(option: Option) -> dict[str, Any]:
    return {
        "schedule": option.name,
        "stages_per_rank": option.stages_per_rank,
        "cuts": list(option.partition.cuts),
        "step_time": option.timeline.step_time,
        "bubble": option.timeline.bubble,
        "idle": list(option.timeline.idle),
    }


def _write_tables(profile: Profile, found: list[Option]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    layers = Table(box=None, pad_edge=False, title="layers: milliseconds for one micro-batch", title_justify="left")
    for heading in ("layer", "type", "parameters", "F", "I", "W", "kept", "output"):
        layers.add_column(heading, justify="left" if heading in ("layer", "type") else "right")
    for number, layer in enumerate(profile.layers):
        times = (f"{1e3 * t:.3f}" for t in (layer.forward, layer.input_grad, layer.weight_grad))
        sizes = map(_size, (layer.activation_bytes, layer.output_bytes))
        layers.add_row(str(number), layer.type, f"{layer.parameters:,}", *times, *sizes)
    console.print(layers)
    if profile.speeds:
        console.print("speed of each rank: " + " ".join(f"{speed:.2f}" for speed in profile.speeds))
    table = Table(box=None, pad_edge=False, title="\nschedules, the fastest first", title_justify="left")
    for heading in ("", "schedule", "stages a rank", "step ms", "bubble", "idle by rank", "layers of each stage"):
        justify: Literal["left", "right"] = "right" if heading in ("stages a rank", "step ms", "bubble") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading in ("schedule", "idle by rank"))
    for place, option in enumerate(found):
        idle = " ".join(f"{100 * idle:.0f}%" for idle in option.timeline.idle)
        table.add_row(
            "*" if place == 0 else "",
            option.name,
            str(option.stages_per_rank),
            f"{1e3 * option.timeline.step_time:.2f}",
            f"{100 * option.timeline.bubble:.1f}%",
            idle,
            str(option.partition),
        )
    console.print(table)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
