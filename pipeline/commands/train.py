"""``pipeloom train``: trains any model by name, in this process or on all ranks that torchrun starts."""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partition.errors import PartitionError
from pipeline.commands import loading
from pipeline.commands.shared import check_target, positive
from pipeline.config import PipelineConfig
from pipeline.errors import CheckpointError, ConfigError, DataError, EndOfData, ModelError, PipelineError
from schedules.errors import ScheduleError

if TYPE_CHECKING:
    from pipeline.engine import Engine

bad_input = (
    loading.CannotLoad,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PartitionError,
    ScheduleError,
    OSError,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="settings, a TOML, YAML or JSON file; options go over them")
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="stop after this many steps (default: when the data end)"
    )
    parser.add_argument(
        "--optimizer", default="torch.optim:AdamW", metavar="FILE:NAME",
        help="an optimizer class or a function of parameter groups (default: torch.optim:AdamW)",
    )  # fmt: skip
    parser.add_argument("--lr", type=float, metavar="RATE", help="learning rate (default: the optimizer's own)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="draw the last step: .html, .png, .svg or .json")
    PipelineConfig.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from pipeline import initialize

    if options.save is not None:
        check_target(options.save)
    module = loading.load_model(options)
    config = PipelineConfig.load(options.config, options)
    optimizer = loading.load(options.optimizer)
    if options.lr is not None:
        optimizer = partial(optimizer, lr=options.lr)
    engine = initialize(module, config=config, optimizer=optimizer)
    data = loading.load_data(options)
    _skip(data, engine.items)
    _train(engine, data, options.steps)
    if config.save_to is not None:
        _say(engine, f"saved {engine.finish_saving() if engine.should_stop else engine.save_checkpoint()}")
    _draw(engine, options.save)
    _tell_split(engine)
    return 0


def _train(engine: Engine, data: Any, steps: int | None) -> None:
    from pipeline.progress import live

    with live(engine, steps, unit="micro-batches", amount=engine.config.micro_batches * engine.mesh.data) as report:
        while not engine.should_stop and (steps is None or engine.steps < steps):
            try:
                report(engine.train_batch(data))
            except EndOfData as error:
                if engine.steps == 0:
                    raise loading.CannotLoad("the data hold no micro-batch; let --data give at least one") from error
                break


def _draw(engine: Engine, path: Path | None) -> None:
    try:
        measured = engine.timeline()
    except PipelineError:
        return  # nothing was trained
    if path is not None:
        measured.save(path, over=[] if engine.profile is None else [engine.predicted_timeline()])
        _say(engine, f"drew the last step in {path}")


def _tell_split(engine: Engine) -> None:
    """What of the weights a schedule that splits backward cannot put off."""
    from schedules import facts

    if engine.stats is None or not facts(engine.config.schedule).splits_backward:
        return
    split = engine.split_report()
    if split.share:
        _say(
            engine,
            f"{split}\nso that {split.share:.0%} of the weights leave nothing to W. Where that is much, use them by "
            "nn.Linear, nn.Embedding, nn.Conv or their functions, or choose a schedule that does not split backward",
        )


def _skip(data: Any, items: int) -> None:
    next(itertools.islice(data, items, items), None)


def _say(engine: Engine, text: str) -> None:
    if engine.mesh.rank == 0:
        sys.stdout.write(f"{text}\n")
