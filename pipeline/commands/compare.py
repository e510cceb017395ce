"""``pipeloom compare``: several schedules of one model on one time axis, with the difference in words."""

from __future__ import annotations

import argparse
import json
import sys

import schedules
from pipeline.commands import shared
from schedules import Schedule
from schedules.errors import ImpossibleShape, ScheduleError

bad_input = (ScheduleError, OSError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "schedules", nargs="+", metavar="NAME",
        help="names of schedules, or CSV files of torch's form; NAME:V is a schedule with V stages a rank; "
        "--stages-per-rank is for those that can hold so many",
    )  # fmt: skip
    shared.add_shape(parser)
    shared.add_output(parser)


def run(options: argparse.Namespace) -> int:
    if len(options.schedules) < 2:
        raise ImpossibleShape("one schedule is nothing to compare; name another, or use pipeloom timeline")
    timelines = [shared.predict(_make(text, options), options) for text in options.schedules]
    shared.save(timelines, options)
    if options.json:
        first, *others = timelines
        numbers = {
            "costs": shared.rank_costs(options),
            "timelines": [shared.summary(timeline) for timeline in timelines],
            "differences": [first.difference(other).text() for other in others],
        }
        text = json.dumps(numbers, indent=2)
    else:
        text = shared.drawn(timelines, options)
    sys.stdout.write(f"{text}\n")
    return 0


def _make(text: str, options: argparse.Namespace) -> Schedule:
    name, colon, number = text.rpartition(":")
    if colon and number.isdecimal():
        return shared.make_schedule(name, options, int(number))
    asked = options.stages_per_rank
    if asked is not None and not text.lower().endswith(".csv"):
        allowed = schedules.facts(text).stages_per_rank
        return shared.make_schedule(text, options, asked if allowed.allow(asked) else allowed.default)
    return shared.make_schedule(text, options)
