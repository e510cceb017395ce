"""The layout does not change a bit: losses, norms and weights after some steps, in float32, with dropout on."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import run_local
from schedules import facts
from tests.pipeline.layouts import Layout, layouts, training_schedules
from tests.pipeline.models import LAYERS, MakeOptimizer, Recipe, adamw, micro_batches, restless, sgd
from tests.pipeline.orders import declare
from tests.pipeline.reference import Case, Outcome, agree
from tests.pipeline.running import everywhere, run, same_bits, start, train_here, transformer_case

STEPS = 3


@cache
def one_process(
    recipe: Recipe, count: int, optimizer: MakeOptimizer = restless, clip: float | None = None, copies: int = 1
) -> Outcome:
    """What one pipeline rank without any recomputation computes: what all layouts are held against."""
    case = transformer_case(recipe, count, steps=STEPS, optimizer=optimizer)
    return run(case, Layout("1f1b", copies, micro_batches=count, data_parallel=copies), gradient_clipping=clip)


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    """A schedule, its shape, cuts that may leave stages empty, layers that recompute, receives posted ahead."""
    name = draw(st.sampled_from(training_schedules()))
    ranks, stages_per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    possible = list(layouts((ranks,), (stages_per_rank,), range(1, 7), [name]))
    if not possible:
        ranks, stages_per_rank = draw(st.integers(1, 2)) * 2, facts(name).stages_per_rank.default
        possible = list(layouts((ranks,), (stages_per_rank,), range(1, 9), [name]))
    layout = draw(st.sampled_from(possible))
    cut = layout.build().num_layer_groups - 1
    inner = draw(st.lists(st.integers(0, LAYERS), min_size=cut, max_size=12))
    cuts = (0, *sorted(inner[:cut]), LAYERS)
    recompute = draw(st.sampled_from(["none", "every", "every:3"]) | st.sets(st.integers(0, 11), min_size=1).map(tuple))
    ahead = draw(st.integers(0, 3))
    return Layout(
        name, ranks, stages_per_rank, layout.micro_batches, partition=cuts, recompute=recompute, receive_ahead=ahead
    )


@settings(max_examples=25)
@given(layout=any_layout(), tied=st.booleans(), clip=st.sampled_from([None, 0.5]))
def test_any_layout(layout: Layout, tied: bool, clip: float | None) -> None:
    count, recipe, optimizer = layout.micro_batches, Recipe(tied=tied), restless
    if not layout.exact:
        recipe, optimizer = recipe._replace(dtype=torch.float64), sgd
    case = transformer_case(recipe, count, steps=STEPS, optimizer=optimizer)
    found, expected = run(case, layout, gradient_clipping=clip), one_process(recipe, count, optimizer, clip)
    if layout.exact:
        assert same_bits(found, expected)
    else:
        agree(found, expected, str(layout))


@pytest.mark.parametrize(
    "layout",
    [
        Layout("split", 1, micro_batches=5),
        Layout("split", 3, micro_batches=5),
        Layout("split", 4, micro_batches=2, recompute="every"),
        Layout("vee", 1, 2, micro_batches=5),
        Layout("vee", 3, 2, micro_batches=5),
        Layout("vee", 2, 2, micro_batches=3, recompute=(0, 3, 5, 10)),
    ],
    ids=str,
)
def test_a_backward_in_two_parts(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch)
    assert layout.exact
    found = run(transformer_case(Recipe(), layout.micro_batches, steps=STEPS, optimizer=restless), layout)
    assert same_bits(found, one_process(Recipe(), layout.micro_batches))


def test_a_schedule_out_of_order_agrees_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch)
    layout, double = Layout("late-first", 2, micro_batches=5), Recipe(dtype=torch.float64)
    assert not layout.exact
    found = run(transformer_case(double, 5, steps=STEPS), layout)
    agree(found, one_process(double, 5, sgd), str(layout))


@pytest.mark.parametrize("optimizer", [restless, adamw], ids=["restless", "adamw"])
@pytest.mark.parametrize("copies", [2, 3])
def test_pipelines_of_any_length_in_copies(copies: int, optimizer: MakeOptimizer) -> None:
    expected = one_process(Recipe(), 4, optimizer, copies=copies)
    case = transformer_case(Recipe(), 4, steps=STEPS, optimizer=optimizer)
    for layout in (
        Layout("1f1b", 2 * copies, data_parallel=copies),
        Layout("interleaved-1f1b", 2 * copies, 3, data_parallel=copies, recompute="every:2"),
    ):
        assert same_bits(run(case, layout), expected), str(layout)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_evaluation_between_steps(norm: str) -> None:
    case, layout = transformer_case(Recipe(norm=norm), 4, steps=STEPS), Layout("interleaved-1f1b", 2, 2)
    assert same_bits(run_local(_train_and_evaluate, 2, case, layout)[0], run(case, layout))


def _train_and_evaluate(case: Case, layout: Layout) -> Outcome:
    engine = start(case, layout)
    before = engine.full_state_dict()
    losses, norms = [], []
    for step in range(case.steps):
        evaluated = [engine.eval_batch(micro_batches(2, 50)).item() for _ in range(2)]
        assert evaluated[0] == evaluated[1]
        losses.append(engine.train_batch(case.items(step, 0)).item())
        norms.append(engine.stats.gradient_norm if engine.stats else 0.0)
        engine.forward(micro_batches(3, 60))
    return Outcome(before, tuple(losses), tuple(norms), (), engine.full_state_dict())


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("recompute", ["none", "every"])
def test_the_users_own_random_numbers(processes: bool, recompute: str) -> None:
    """The engine leaves the global generator as it was, and does not use what it finds there."""
    layout = Layout("1f1b", 2, recompute=recompute)
    case = transformer_case(Recipe(), 4, steps=2)
    results = everywhere(_draw_around_steps, 2, case, layout, processes=processes)
    torch.manual_seed(11)
    alone = torch.rand(4, 3)
    own = [draws for _, draws in results] if processes else [results[0][1]]
    assert all(torch.equal(draws, alone) for draws in own)
    assert {losses for losses, _ in results} == {run(case, Layout()).losses}


def _draw_around_steps(case: Case, layout: Layout) -> tuple[tuple[float, ...], torch.Tensor]:
    """Draws before the engine is made, then after each step; threads share a generator, so that only rank 0 draws."""
    engine: Any = None
    losses, draws = [], []
    from pipeline.mesh import make_mesh

    mesh = make_mesh()
    draw = mesh.random_lock is None or mesh.rank == 0
    if draw:
        torch.manual_seed(11)
    for step in range(-2, case.steps):
        mesh.world.barrier()
        if draw:
            draws.append(torch.rand(3))
        mesh.world.barrier()
        if step == -1:
            engine = start(case, layout)
        elif step >= 0:
            losses.append(engine.train_batch(case.items(step, 0)).item())
    return tuple(losses), torch.stack(draws) if draws else torch.empty(0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_compute_what_threads_do(ranks: int) -> None:
    """Every schedule that promises the same bits, with copies of the pipeline where there are ranks enough."""
    chosen = [next(layouts((ranks,), (2, 1), (4,), [name])) for name in training_schedules()]
    chosen = [layout for layout in chosen if layout.exact]
    if ranks == 4:
        chosen.append(Layout("1f1b", 4, data_parallel=2, recompute="every"))
    case = transformer_case(Recipe(), 4, steps=STEPS, optimizer=restless)
    for layout, (found, agrees), *_ in zip(
        chosen, *everywhere(_train_in_each, ranks, case, chosen, processes=True), strict=True
    ):
        assert agrees, str(layout)
        assert same_bits(found, one_process(Recipe(), 4, copies=layout.data_parallel)), str(layout)


def _train_in_each(case: Case, chosen: list[Layout]) -> list[tuple[Outcome, bool]]:
    return [train_here(case, layout) for layout in chosen]
