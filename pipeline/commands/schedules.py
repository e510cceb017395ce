"""``pipeloom schedules``: what can be chosen by name, as the schedules themselves declare it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import schedules
from schedules.errors import ScheduleError
from schedules.registry import Facts

bad_input = (ScheduleError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write the same facts as JSON, a list with one object each")


def run(options: argparse.Namespace) -> int:
    known = [schedules.facts(name) for name in schedules.names()]
    if options.json:
        sys.stdout.write(json.dumps([_as_json(facts) for facts in known], indent=2) + "\n")
    else:
        _write_table(known)
    return 0


def _as_json(facts: Facts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "description": facts.doc,
        "aliases": list(facts.aliases),
        "stages_per_rank": {
            "default": facts.stages_per_rank.default,
            "least": facts.stages_per_rank.least,
            "most": facts.stages_per_rank.most,
        },
        "placement": facts.placement,
        "micro_batches": facts.micro_batches.text,
        "splits_backward": facts.splits_backward,
        "options": {name: repr(default) for name, default in facts.options.items()},
    }


def _write_table(known: list[Facts]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("schedule, other names", no_wrap=True)
    table.add_column("stages\na rank", max_width=9)
    table.add_column("micro-\nbatches", max_width=10)
    table.add_column("backward", max_width=8)
    table.add_column("what it is", ratio=1)
    for facts in known:
        name = Text(facts.name, style="bold")
        for alias in facts.aliases:
            name.append(f"\n {alias}", style="not bold dim")
        options = "".join(f" Option {option} (default {default!r})." for option, default in facts.options.items())
        table.add_row(
            name,
            str(facts.stages_per_rank),
            facts.micro_batches.text.removesuffix(" of micro-batches"),
            "I and W" if facts.splits_backward else "whole",
            Text(facts.doc + options),
        )
    Console(highlight=False).print(table)
