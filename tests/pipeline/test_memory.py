"""What lives during a step: exactly what the simulator says, and no more of it where there are more micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from benchmarks.live_layers import Course, Living, courses, engine_of, step
from benchmarks.peaks import tensor_bytes
from pipeline import run_local
from schedules import Kind, Schedule, build
from schedules.action import actions_of
from tests.pipeline.layouts import training_schedules
from tests.pipeline.processes import run_processes

RANKS, MICRO_BATCHES = 4, 6


def courses_of(schedule: Schedule, **others: Any) -> list[list[Course]]:
    """By rank and step, with a layer a stage."""
    settings = {
        "schedule": schedule.name,
        "micro_batches": schedule.micro_batches,
        "stages_per_rank": schedule.num_stages // schedule.ranks,
        **others,
    }
    return run_local(courses, schedule.ranks, settings, schedule.num_layer_groups, timeout=60.0)


@pytest.mark.parametrize("name", training_schedules())
def test_live_activations_are_what_the_simulator_says(name: str) -> None:
    schedule = build(name, ranks=RANKS, micro_batches=MICRO_BATCHES)
    for rank, steps in enumerate(courses_of(schedule)):
        for course in steps:
            assert course.counted == course.simulated, f"rank {rank}"
            assert max(course.counted) == pytest.approx(course.peak, rel=1e-12)


@pytest.mark.parametrize("name", training_schedules())
def test_of_recomputed_layers_nothing_lives_from_the_forward_to_the_backward(name: str) -> None:
    schedule = build(name, ranks=RANKS, micro_batches=MICRO_BATCHES)
    changes = {Kind.F: (1, -1), Kind.B: (1, -1), Kind.I: (1,), Kind.W: (-1,)}
    share = schedule.ranks / schedule.num_layer_groups
    for row, steps in zip(schedule.rows, courses_of(schedule, recompute="every"), strict=True):
        expected = [0, *(change for entry in row for action in actions_of(entry) for change in changes[action.kind])]
        for course in steps:
            assert course.counted == tuple(share * live for live in accumulate(expected))


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("1f1b", lambda m: [4, 3, 2, 1]),
        ("zb-h1", lambda m: [4, 4, 4, 4]),
        ("gpipe", lambda m: [m, m, m, m]),
    ],
    ids=["1f1b", "zb-h1", "gpipe"],
)
def test_live_activations_over_micro_batches(name: str, peaks: Callable[[int], list[float]]) -> None:
    for number in (4, 8, 16, 32):
        found = courses_of(build(name, ranks=RANKS, micro_batches=number))
        assert [max(steps[-1].counted) for steps in found] == peaks(number)


def test_peak_bytes_over_micro_batches() -> None:
    """On processes, by what torch's allocator hands out: messages, gradients and all."""
    for name, flat in (("1f1b", True), ("zb-h1", True), ("gpipe", False)):
        few, many = (run_processes(most_bytes, 2, name, number) for number in (4, 16))
        for rank, (ours, base) in enumerate(zip(many, few, strict=True)):
            assert ours < 1.02 * base if flat else ours > 2 * base, f"{name}, rank {rank}: {few} and {many} bytes"


def most_bytes(name: str, micro_batches: int) -> int:
    # Over sockets, where a message that nobody waits for holds its tensor.
    engine = engine_of({"schedule": name, "micro_batches": micro_batches, "link": "gloo"}, 4, Living(), 512, 64)
    step(engine, 64)
    return tensor_bytes(lambda: step(engine, 64))


def test_an_activation_lives_as_long_as_somebody_holds_its_memory() -> None:
    """The count itself: neither another tensor on the same memory nor a graph can hide what it keeps."""
    living = Living()
    first, second = torch.ones(3), torch.ones(3, requires_grad=True).exp()
    living.add(first)
    living.add(second)
    view, graph = first[1:].detach(), second.square()
    del first, second
    assert living.changes == [1, 1]
    del view
    assert living.changes == [1, 1, -1]
    graph.sum().backward()
    assert living.changes == [1, 1, -1, -1]


def test_a_course_tells_where_it_leaves_the_simulated_one() -> None:
    same = Course((0, 1, 2, 1, 0), (0, 1, 2, 1, 0), 2)
    assert same.agreed == 5
    assert same._replace(counted=(0, 1, 2, 3, 2, 1, 0)).agreed == 3
    assert same._replace(counted=(0, 1, 2, 1)).agreed == 4
