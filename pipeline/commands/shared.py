"""What the commands that draw schedules share: their arguments, and how a name becomes a timeline."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import schedules
from schedules import Costs, Schedule, Timeline
from schedules.errors import CostError, ImpossibleShape, ScheduleError
from schedules.saving import view_of

RANKS, MICRO_BATCHES = 4, 8
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
COSTS = ("F", "I", "W", "hop")


class CannotWrite(ScheduleError):
    """The file that was asked for cannot be written."""


class Time(NamedTuple):
    """A time from the command line: seconds where a unit was given, else a plain number."""

    value: float
    has_unit: bool


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how large and how dear."""
    shape = parser.add_argument_group("shape")
    shape.add_argument("--ranks", type=positive, metavar="P", help=f"pipeline ranks (default {RANKS})")
    shape.add_argument(
        "--micro-batches", type=positive, metavar="M", help=f"micro-batches in the step (default {MICRO_BATCHES})"
    )
    shape.add_argument(
        "--stages-per-rank", type=positive, metavar="V",
        help="stages that each rank holds (default: the schedule's own)",
    )  # fmt: skip
    shape.add_argument(
        "--memory-cap", type=float, metavar="N",
        help="micro-batches of its whole share that a rank may hold, for schedules that are timed: auto, v-half, v-min",
    )  # fmt: skip
    costs = parser.add_argument_group(
        "costs",
        "Times of one micro-batch on one rank, with all the stages the rank holds: plain numbers, which are relative, "
        "or times such as 20ms. Schedules with other numbers of stages a rank are so compared on the same model.",
    )
    costs.add_argument("--F", type=_time, metavar="TIME", help="forward (default 1)")
    costs.add_argument("--I", type=_time, metavar="TIME", help="gradient of the input (default: as F)")
    costs.add_argument("--W", type=_time, metavar="TIME", help="gradient of the weights (default: as F)")
    costs.add_argument("--hop", type=_time, metavar="TIME", help="a message from rank to rank (default 0)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what to write and how."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--save", type=Path, metavar="FILE",
        help="also write a page (.html), a picture (.png, .svg) or a trace for ui.perfetto.dev (.json)",
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="write numbers as JSON in place of the drawing")
    output.add_argument(
        "--width", type=positive, metavar="COLUMNS", help="width of the drawing (default: the terminal's, or 80)"
    )
    output.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    output.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto",
        help="colours in the drawing (default: auto, in a terminal and without NO_COLOR)",
    )  # fmt: skip


def make_schedule(text: str, options: argparse.Namespace, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of a name, or of a CSV file, which brings its own shape."""
    if text.lower().endswith(".csv"):
        return _read(Path(text), options)
    number = options.stages_per_rank if stages_per_rank is None else stages_per_rank
    return schedules.build(
        text,
        ranks=options.ranks or RANKS,
        micro_batches=options.micro_batches or MICRO_BATCHES,
        stages_per_rank=number,
        **_timing(text, options, number),
    )


def _timing(text: str, options: argparse.Namespace, stages_per_rank: int | None) -> dict[str, Any]:
    """What was asked for of the options of schedules that are timed: the costs of a stage, the memory of a rank."""
    known, timing = schedules.facts(text), {}
    if "costs" in known.options and any(getattr(options, name) is not None for name in COSTS):
        timing["costs"] = _costs(options).divided(stages_per_rank or known.stages_per_rank.default or 1)
    if "memory_cap" in known.options and options.memory_cap is not None:
        timing["memory_cap"] = options.memory_cap
    return timing


def found(text: str, options: argparse.Namespace) -> str:
    """What a schedule that is searched for was made from and held against, in a line; nothing for others."""
    from schedules.search import search, task_for

    if text.lower().endswith(".csv") or not schedules.facts(text).chooses:
        return ""
    shape = options.ranks or RANKS, options.micro_batches or MICRO_BATCHES, options.stages_per_rank
    return search(task_for(*shape, **_timing(text, options, options.stages_per_rank))).text()


def _read(path: Path, options: argparse.Namespace) -> Schedule:
    schedule = Schedule.from_csv(path)
    for name in ("ranks", "micro_batches", "stages_per_rank"):
        asked, found = getattr(options, name), getattr(schedule, name)
        if asked is not None and asked != found:
            flag = "--" + name.replace("_", "-")
            raise ImpossibleShape(f"{path} has {name.replace('_', ' ')} {found}, not {asked}; leave out {flag}")
    return schedule


def predict(schedule: Schedule, options: argparse.Namespace) -> Timeline:
    """The simulated timeline, with the costs of a rank shared out evenly to its stages."""
    costs = rank_costs(options)
    share = schedule.ranks / max(schedule.num_layer_groups, 1)
    return schedules.simulate(
        schedule, Costs(F=costs["F"] * share, I=costs["I"] * share, W=costs["W"] * share, hop=costs["hop"])
    )


def _costs(options: argparse.Namespace) -> Costs:
    """The costs asked for, of a rank's whole share."""
    given = rank_costs(options)
    return Costs(F=given["F"], I=given["I"], W=given["W"], hop=given["hop"])


def rank_costs(options: argparse.Namespace) -> dict[str, float]:
    """The costs asked for, by name, with what was left out filled in."""
    given: dict[str, Time] = {name: getattr(options, name) for name in COSTS if getattr(options, name) is not None}
    units = {time.has_unit for time in given.values() if time.value}
    if len(units) > 1:
        plain = next(name for name, time in given.items() if time.value and not time.has_unit)
        raise CostError(f"--{plain} has no unit and others have; write all of them like 20ms, or none")
    if True in units and "F" not in given:
        raise CostError("--F is missing: where times have units, give at least --F, such as --F 20ms")
    forward = given.get("F", Time(1.0, has_unit=False)).value
    costs = {"F": forward, "I": forward, "W": forward, "hop": 0.0}
    return costs | {name: time.value for name, time in given.items()}


def unit(options: argparse.Namespace) -> str:
    """Seconds, or none where the costs are plain numbers."""
    times = [getattr(options, name) for name in COSTS]
    return "s" if any(time is not None and time.has_unit for time in times) else ""


def save(timelines: Sequence[Timeline], options: argparse.Namespace) -> None:
    """Write the file that ``--save`` names, if it does."""
    if options.save is None:
        return
    try:
        timelines[0].save(options.save, over=timelines[1:], unit=unit(options))
    except OSError as error:
        raise CannotWrite(f"cannot write {options.save}: {error.strerror or error}") from error


def check_target(path: Path) -> None:
    """Raise now, and not after hours of training, when a timeline could not be saved under this path."""
    view_of(path)
    if not path.parent.is_dir():
        raise CannotWrite(f"cannot write {path}: there is no folder {path.parent}")


def drawn(timelines: Sequence[Timeline], options: argparse.Namespace) -> str:
    """The drawing for the terminal."""
    from schedules.views import text

    terminal = sys.stdout.isatty()
    colour = options.color == "always" or (options.color == "auto" and terminal and not os.environ.get("NO_COLOR"))
    return text.draw(
        timelines[0],
        over=timelines[1:],
        unit=unit(options),
        width=options.width or (shutil.get_terminal_size().columns if terminal else 80),
        colour=colour,
        ascii=options.ascii or not _can_draw(sys.stdout.encoding),
    )


def summary(timeline: Timeline) -> dict[str, Any]:
    """The numbers of a timeline for ``--json``."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "micro_batches": schedule.micro_batches,
        "stages_per_rank": schedule.stages_per_rank,
        "kind": timeline.kind,
        "step_time": timeline.step_time,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "idle": list(timeline.idle),
        "idle_by_cause": [dict(by_cause) for by_cause in timeline.idle_by_cause],
        "peak_activations": list(timeline.peak_activations),
    }


def _can_draw(encoding: str | None) -> bool:
    try:
        "─░▒·×".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _time(text: str) -> Time:
    match = re.fullmatch(r"(\d*\.?\d+(?:e-?\d+)?|\d+\.)\s*(s|ms|us|µs)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write a number, 0 or more, or one with s, ms or us")
    number, name = match.groups()
    return Time(float(number) * SECONDS[(name or "s").lower()], has_unit=name is not None)
