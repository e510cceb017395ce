"""What a run shows in the terminal, and the table of prediction and measurement."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeline import progress
from schedules import Costs, build, simulate


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "perf_counter", clock)
    return clock


def run(
    clock: Clock,
    steps: int,
    *,
    terminal: bool = False,
    rank: int = 0,
    begin: int = 0,
    total: int | None = -1,
    notes: tuple[str, ...] = (),
) -> str:
    """What is shown of steps of half a second each, the bubble going down from 50 % by 1 % a step."""
    total = steps if total == -1 else total
    engine: Any = SimpleNamespace(steps=begin, stats=None, notes=(), mesh=SimpleNamespace(rank=rank))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100, color_system=None, highlight=False)
    with progress.live(engine, total, unit="rows", amount=10, console=console) as report:
        for _ in range(begin, steps):
            clock.now += 0.5
            engine.steps += 1
            engine.notes = notes[: engine.steps]
            engine.stats = SimpleNamespace(bubble=0.5 - engine.steps / 100)
            report(torch.tensor(1.0 / engine.steps))
    return shown.getvalue()


def test_a_log_gets_a_line_for_each_step_of_a_short_run(clock: Clock) -> None:
    assert run(clock, 3).splitlines() == [
        "step 1/3  loss 1.000  bubble 49.0 %",
        "step 2/3  loss 0.500  20 rows/s  bubble 48.5 %",
        "step 3/3  loss 0.333  20 rows/s  bubble 48.0 %",
    ]


def test_notes_are_shown_once_when_they_come(clock: Clock) -> None:
    assert run(clock, 3, notes=("first", "second")).splitlines() == [
        "first",
        "step 1/3  loss 1.000  bubble 49.0 %",
        "second",
        "step 2/3  loss 0.500  20 rows/s  bubble 48.5 %",
        "step 3/3  loss 0.333  20 rows/s  bubble 48.0 %",
    ]


def test_a_log_gets_twenty_lines_of_a_long_run(clock: Clock) -> None:
    lines = run(clock, 45).splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/45" for step in (*range(2, 46, 2), 45)]


def test_a_run_that_ends_early_shows_its_last_step(clock: Clock) -> None:
    lines = run(clock, 5, total=100).splitlines()
    assert lines == ["step 5/100  loss 0.200  20 rows/s  bubble 47.0 %"]


def test_a_log_of_unknown_length_gets_every_tenth_step_and_the_last(clock: Clock) -> None:
    lines = run(clock, 23, total=None).splitlines()
    assert [line.split()[1] for line in lines] == ["10", "20", "23"]


def test_speed_and_bubble_are_means_over_the_last_steps(clock: Clock) -> None:
    last = run(clock, 40).splitlines()[-1]
    steps = range(40 - progress.WINDOW, 41)
    assert last == f"step 40/40  loss 0.025  20 rows/s  bubble {50 - sum(steps) / len(steps):.1f} %"


def test_a_terminal_gets_one_line_that_renews_itself(clock: Clock) -> None:
    shown = run(clock, 3, terminal=True)
    assert "\r" in shown
    assert "step 3/3 " in shown
    assert "loss 0.333  20 rows/s  bubble 48.0 %" in shown


def test_a_resumed_run_starts_where_it_was(clock: Clock) -> None:
    assert run(clock, 5, begin=4) == "step 5/5  loss 0.200  bubble 45.0 %\n"


def test_other_ranks_write_nothing(clock: Clock) -> None:
    assert run(clock, 3, rank=1) == ""


def test_a_table_of_prediction_and_measurement() -> None:
    schedule = build("1f1b", ranks=2, micro_batches=3)
    predicted = simulate(schedule, Costs(F=0.01, I=0.01, W=0.01))
    measured = simulate(schedule, Costs(F=0.01, I=[0.01, 0.02], W=0.01))
    console = Console(file=io.StringIO(), width=80)
    console.print(progress.beside(predicted, measured))
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        if line.startswith("│")
    ]
    assert cells == [
        ["step", "120.0 ms", "150.0 ms", "+25.0 %"],
        ["bubble, rank 0", "25.0 %", "40.0 %", "+15.0 points"],
        ["bubble, rank 1", "25.0 %", "20.0 %", "-5.0 points"],
        ["bubble, mean", "25.0 %", "30.0 %", "+5.0 points"],
    ]
