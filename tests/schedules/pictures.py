"""Schedules as text: what tests compare with, and what the docstrings of the library show."""

from __future__ import annotations

from schedules import Action, Costs, Kind, Schedule, simulate

MARKS = " '\""


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """One line a rank, two characters a unit of time: 0 is a forward, aaa its backward, ' the second stage.

    Where the backward is split, a is the gradient of the input and A that of the weights.
    """
    timeline = simulate(schedule, costs)
    lines = []
    for rank, row in enumerate(schedule.rows):
        stages, line, at = schedule.stages_of_rank(rank), "", 0.0
        for entry, start, end in zip(row, timeline.start[rank], timeline.end[rank], strict=True):
            if not isinstance(entry, Action):
                raise TypeError("a pair has no picture here")
            letter = chr(ord("A" if entry.kind is Kind.W else "a") + entry.micro_batch) * (int(end - start) * 2 - 1)
            text = f"{entry.micro_batch:x}" if entry.kind is Kind.F else letter
            line += ". " * int(start - at) + text + MARKS[stages.index(entry.stage)]
            at = end
        line += ". " * int(timeline.step_time - at)
        lines.append(f"rank {rank} | {line}".rstrip())
    return "\n".join(lines)


def rows(text: str) -> list[list[Action]]:
    """Rows of actions from one line a rank: ``0F0 0F1 0B0``."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]
