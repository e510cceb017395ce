"""A bar for work that takes long, on a terminal and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[float], None]
"""Told which part of the work is done, from 0 to 1."""


@contextmanager
def bar(title: str, *, show: bool) -> Iterator[Progress]:
    """Draw a bar on the error stream, if that is a terminal and rich is installed."""
    if not show or not sys.stderr.isatty():
        yield _nothing
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Rich
    except ImportError:
        yield _nothing
        return
    with Rich(console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(title, total=1.0)
        yield lambda done: drawn.update(task, completed=done)


def _nothing(done: float) -> None:
    """No bar."""
