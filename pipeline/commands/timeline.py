"""``pipeloom timeline``: what one schedule does, simulated and drawn."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.commands import shared
from schedules.errors import ScheduleError

bad_input = (ScheduleError, OSError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedule", default="1f1b", metavar="NAME",
        help="name of the schedule, as pipeloom schedules lists them, or a CSV file of torch's form (default 1f1b)",
    )  # fmt: skip
    shared.add_shape(parser)
    shared.add_output(parser)


def run(options: argparse.Namespace) -> int:
    timeline = shared.predict(shared.make_schedule(options.schedule, options), options)
    shared.save([timeline], options)
    if options.json:
        text = json.dumps(shared.summary(timeline) | {"costs": shared.rank_costs(options)}, indent=2)
    else:
        text = "\n\n".join(filter(None, (shared.drawn([timeline], options), shared.found(options.schedule, options))))
    sys.stdout.write(f"{text}\n")
    return 0
