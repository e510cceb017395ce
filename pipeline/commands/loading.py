"""A model and its data by name: ``my_file:MyModel``, ``package.module:batches``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from partition import Profile
    from pipeline.module import PipelineModule

DATA_NAME = "batches"


class CannotLoad(PipelineError):
    """A name on the command line that leads nowhere, or to something else."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a model and its data."""
    parser.add_argument(
        "model", metavar="FILE:MODEL",
        help="a PipelineModule, or a class or function that makes one: my_file:MyModel, or package.module:MyModel",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="FILE:BATCHES",
        help="a function that returns an iterator of micro-batches (inputs, targets), the same on every rank "
        f"(default: {DATA_NAME} of the model's file)",
    )  # fmt: skip


def load_model(options: argparse.Namespace) -> PipelineModule:
    """The model that the command line names."""
    from pipeline.module import PipelineModule

    model = load(options.model)
    if not isinstance(model, PipelineModule) and callable(model):
        model = model()
    if not isinstance(model, PipelineModule):
        raise CannotLoad(f"{options.model} is a {type(model).__name__}; name a PipelineModule or what makes one")
    return model


def load_data(options: argparse.Namespace) -> Iterator[Any]:
    """A fresh iterator of the micro-batches that the command line names."""
    name = options.data or f"{options.model.partition(':')[0]}:{DATA_NAME}"
    source = load(name)
    try:
        return iter(source() if callable(source) else source)
    except TypeError as error:
        raise CannotLoad(f"{name} gives no iterator of micro-batches: {error}") from error


def measure(options: argparse.Namespace, module: PipelineModule, **how: Any) -> Profile:
    """What the model's layers cost on the first micro-batch of the data, by ``profile_alone``."""
    from pipeline.batch import read_items
    from pipeline.profiler import profile_alone

    items = read_items(load_data(options), 1)
    if not items:
        raise CannotLoad("the data hold no micro-batch to measure on; let --data give at least one")
    return profile_alone(module, items[0], **how)


def load(name: str) -> Any:
    """The object that ``file:attribute`` or ``package.module:attribute`` names."""
    where, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise CannotLoad(f"{name!r} names no object; write FILE:NAME, as in my_file:MyModel")
    path = Path(where if where.endswith(".py") else f"{where}.py")
    if path.is_file():
        sys.path.insert(0, str(path.parent.resolve()))
        where = path.stem
    elif "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name != where.partition(".")[0] and error.name != where:
            raise
        raise CannotLoad(f"there is neither a file {path} nor a module {where}") from error
    if not hasattr(module, attribute):
        known = ", ".join(sorted(n for n in vars(module) if not n.startswith("_")))
        raise CannotLoad(f"{where} has no {attribute!r}; it has {known}")
    return getattr(module, attribute)
