"""What a run tells its user in the terminal: live progress, and the prediction beside the measurement."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from schedules import Timeline

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.engine import Engine

__all__ = ["WINDOW", "Report", "beside", "live"]

Report = Callable[["Tensor"], None]

WINDOW = 20
"""Steps over which speed and bubble are averaged."""

_REFRESH = 0.1  # seconds between two looks at the loss, which a device would have to be waited for
_LINES = 20  # lines that a run of known length writes into a log
_EVERY = 10  # steps to a line where the length is not known


class _Mark(NamedTuple):
    """What was known at the end of one step."""

    time: float
    bubble: float


@contextmanager
def live(
    engine: Engine, steps: int | None, *, unit: str = "rows", amount: int = 1, console: Console | None = None
) -> Iterator[Report]:
    """Show a training run up to ``steps`` while it goes on; gives the function to call after each step.

    Use it as ``with live(engine, steps) as report: report(engine.train_batch(batches))``.  ``steps`` is None
    where the data decide.  ``amount`` is how many of ``unit`` one step takes, over all data-parallel copies.
    Loss, speed and bubble stand in a line that renews itself in a terminal, and in some twenty lines
    elsewhere, and the engine's notes when there are any.  Only the first rank writes; on the others the function does
    nothing.
    """
    if engine.mesh.rank != 0:
        yield lambda loss: None
        return
    console = console or Console(highlight=False)
    every = _EVERY if steps is None else max(1, steps // _LINES)
    marks: deque[_Mark] = deque(maxlen=WINDOW + 1)
    told = 0  # of the engine's notes
    waiting: Tensor | None = None  # the loss of the last step, while it has not been shown
    shown = 0.0
    with _bar(console) as bar:
        task = bar.add_task("", total=steps, completed=engine.steps, figures="")

        def show(loss: Tensor) -> None:
            figures = _figures(loss, marks, unit, amount)
            bar.update(task, completed=engine.steps, figures=figures)
            if not console.is_terminal:
                console.print(f"step {_of(engine.steps, steps)}  {figures}")

        def report(loss: Tensor) -> None:
            nonlocal waiting, shown, told
            for note in engine.notes[told:]:
                console.print(note)
            told = len(engine.notes)
            now = time.perf_counter()
            marks.append(_Mark(now, engine.stats.bubble if engine.stats else 0.0))
            due = now - shown >= _REFRESH if console.is_terminal else engine.steps % every == 0
            waiting = None if due else loss
            if due:
                shown = now
                show(loss)

        yield report
        if waiting is not None:
            show(waiting)


def _bar(console: Console) -> Progress:
    """A progress bar, which shows nothing where there is no terminal to draw it in."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _of(step: int, steps: int | None) -> str:
    return str(step) if steps is None else f"{step}/{steps}"


def _figures(loss: Tensor, marks: deque[_Mark], unit: str, amount: int) -> str:
    """Loss, speed and bubble; the last two as means over the last steps.

    The speed counts from the end of the first step seen, which may have included measuring the layers.
    """
    bubble = 100 * sum(mark.bubble for mark in marks) / len(marks)
    took = marks[-1].time - marks[0].time
    speed = f"{amount * (len(marks) - 1) / took:,.0f} {unit}/s  " if took else ""
    return f"loss {float(loss):.3f}  {speed}bubble {bubble:.1f} %"


def beside(predicted: Timeline, measured: Timeline) -> Table:
    """A table of both: the step, each rank's bubble, and what the prediction was off by."""
    table = Table(title=measured.schedule.name)
    for name in ("", "predicted", "measured", "difference"):
        table.add_column(name, justify="right" if name else "left")
    before, after = (1e3 * timeline.step_time for timeline in (predicted, measured))
    table.add_row("step", f"{before:.1f} ms", f"{after:.1f} ms", f"{100 * (after / before - 1):+.1f} %")
    names = [*(f"bubble, rank {rank}" for rank in range(measured.schedule.ranks)), "bubble, mean"]
    bubbles = ([100 * part for part in (*one.idle, one.bubble)] for one in (predicted, measured))
    for name, before, after in zip(names, *bubbles, strict=True):
        table.add_row(name, f"{before:.1f} %", f"{after:.1f} %", f"{after - before:+.1f} points")
    return table
