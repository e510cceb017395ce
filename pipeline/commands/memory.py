"""``pipeloom memory``: what each rank will need, before there is any."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from partition import PartitionError, Profile, RankMemory
from pipeline.commands import loading
from pipeline.commands.shared import positive
from pipeline.config import PipelineConfig
from pipeline.errors import PipelineError
from schedules.errors import ScheduleError

bad_input = (loading.CannotLoad, PipelineError, PartitionError, ScheduleError, OSError)


_WIDTH = 110  # characters of the table, which are cut off nowhere


class _Shape(NamedTuple):
    """Ranks that are only thought of."""

    data: int
    pipe: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_model(parser)
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks of the whole run")
    parser.add_argument("--config", metavar="FILE", help="settings, a TOML, YAML or JSON file; options go over them")
    parser.add_argument("--save-profile", type=Path, metavar="FILE", help="save what was measured, for --profile")
    parser.add_argument("--json", action="store_true", help="write everything as JSON")
    PipelineConfig.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from pipeline.mesh import pipe_size
    from pipeline.plan import plan_for
    from pipeline.planning import plan_by, predicted_memory
    from pipeline.precision.types import types_of

    module = loading.load_model(options)
    config = PipelineConfig.load(options.config, options)
    shape = _Shape(config.data_parallel, pipe_size(options.ranks, config.data_parallel))
    begun_with = plan_for(config, module, shape, cuts=(0, len(module)))
    begun = begun_with.build_schedule()
    if config.profile:
        profile = Profile.load(config.profile)
    else:
        types = types_of(config.precision, module)
        profile = loading.measure(options, module, seed=config.seed, recompute=begun_with.recompute, types=types)
    if options.save_profile:
        profile.save(options.save_profile)
    plan = plan_by(config, module, shape, begun, profile=profile, counts=[cost.parameters for cost in profile.layers])
    found = predicted_memory(config, plan, profile)
    if options.json:
        ranks = [{**rank._asdict(), "total": rank.total} for rank in found]
        sys.stdout.write(json.dumps({"cuts": list(plan.cuts), "ranks": ranks}, indent=2) + "\n")
    else:
        _write(found, plan.cuts, config)
    return 0


def _write(found: tuple[RankMemory, ...], cuts: tuple[int, ...], config: PipelineConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    from partition import Partition
    from pipeline.memory import size_text

    fullest = max(range(len(found)), key=lambda rank: found[rank].total)
    copies = f", {config.data_parallel} copies, ZeRO {config.zero}" if config.data_parallel > 1 else ""
    title = f"{config.schedule}{copies}: bytes of each rank of a pipeline at its fullest moment"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("rank", *RankMemory._fields, "total", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, need in enumerate(found):
        table.add_row(str(rank), *map(size_text, (*need, need.total)), "*" if rank == fullest else "")
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(table)
    console.print(
        f"layers of each stage: {Partition(cuts)}; whole: what ZeRO has of layers in use; optimizer: as Adam's; what "
        "operators need for themselves is not counted",
        soft_wrap=True,
    )
