"""Training through a pipeline equals plain PyTorch in one process: to 1e-12 in float64, to 1e-6 in float32.

The whole grid of layouts is `python -m checks.parity`; here is a part of it that takes seconds, and what the grid
does not vary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.pipeline.layouts import Layout, layouts, training_schedules
from tests.pipeline.models import GradientsAsParameters, Recipe, adamw, sgd
from tests.pipeline.reference import Outcome, agree, plainly
from tests.pipeline.running import difference, everywhere, gradients, run, train_here, transformer_case

STEPS = 3
DOUBLE = Recipe(dtype=torch.float64)
SHAPES = ((1, 1, 4), (1, 3, 2), (2, 1, 1), (2, 2, 7), (3, 1, 3), (3, 2, 2), (4, 1, 8), (4, 3, 3))

PART = [
    layout for ranks, stages_per_rank, number in SHAPES for layout in layouts((ranks,), (stages_per_rank,), (number,))
]


@cache
def expected(recipe: Recipe, count: int, steps: int = STEPS) -> Outcome:
    """Plain training from the initial weights of one process."""
    case = transformer_case(recipe, count, steps=steps)
    return plainly(case, Layout(micro_batches=count), _initial(recipe))


@cache
def expected_gradients(recipe: Recipe, count: int) -> Outcome:
    case = transformer_case(recipe, count, steps=1, optimizer=GradientsAsParameters)
    return plainly(case, Layout(micro_batches=count), _initial(recipe))


@cache
def _initial(recipe: Recipe) -> Any:
    return run(transformer_case(recipe, 1, steps=0), Layout(micro_batches=1)).before


@pytest.mark.parametrize("layout", PART, ids=str)
def test_every_schedule_equals_plain_training(layout: Layout) -> None:
    tied = DOUBLE._replace(tied=True)
    case = transformer_case(tied, layout.micro_batches, steps=STEPS)
    agree(run(case, layout), expected(tied, layout.micro_batches), str(layout))


@pytest.mark.parametrize("layout", PART[::2], ids=str)
@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        (DOUBLE, 1e-12),
        (DOUBLE._replace(tied=False), 1e-12),
        (Recipe(), 1e-6),
        (Recipe(tied=False), 1e-6),
    ],
    ids=["tied", "untied", "tied, single", "untied, single"],
)
def test_gradients_equal_those_of_the_weighted_mean_loss(layout: Layout, recipe: Recipe, tolerance: float) -> None:
    found = gradients(transformer_case(recipe, layout.micro_batches), layout)
    wanted = expected_gradients(recipe, layout.micro_batches)
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert difference(found.after, wanted.after) <= tolerance


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_in_processes_equals_plain_training(ranks: int) -> None:
    chosen = [next(layouts((ranks,), (2, 1), (4,), [name])) for name in training_schedules()]
    case = transformer_case(DOUBLE, 4, steps=STEPS)
    for layout, *results in zip(chosen, *everywhere(_train_in_each, ranks, case, chosen, processes=True), strict=True):
        assert all(agrees for _, agrees in results)
        assert len({outcome.losses for outcome, _ in results}) == 1
        agree(results[0][0], expected(DOUBLE, 4), str(layout))


def _train_in_each(case: Any, chosen: list[Layout]) -> list[tuple[Outcome, bool]]:
    return [train_here(case, layout) for layout in chosen]


VARIED = [
    Layout("1f1b", 1),
    Layout("1f1b", 4),
    Layout("interleaved-1f1b", 2, 3),
    Layout("gpipe", 2, 2, recompute="every"),
    Layout("1f1b", 4, data_parallel=2),
    Layout("1f1b", 2, data_parallel=2),
]
varied = pytest.mark.parametrize("layout", VARIED, ids=str)


def check(recipe: Recipe, layout: Layout, *, plain: dict[str, Any] | None = None, **others: Any) -> Outcome:
    """Train both ways; ``plain`` is what the reference does otherwise."""
    optimizer = others.pop("optimizer", sgd)
    case = transformer_case(recipe, layout.micro_batches, steps=STEPS, optimizer=optimizer)
    found = run(case, layout, **others)
    reference = plainly(replace(case, **(plain or {})), layout, found.before, clip=others.get("gradient_clipping"))
    agree(found, reference, str(layout))
    return found


@varied
def test_copies_of_the_pipeline_train_on_all_their_data(layout: Layout) -> None:
    check(DOUBLE, layout)


@varied
def test_gradients_are_clipped_by_the_norm_of_all_of_them(layout: Layout) -> None:
    clipped = check(DOUBLE, layout, gradient_clipping=0.3)
    assert all(norm > 0.3 for norm in clipped.norms)


@varied
def test_what_is_frozen_does_not_move(layout: Layout) -> None:
    recipe = DOUBLE._replace(tied=False, frozen=(0, 1, 2, 5, 11))
    found = check(recipe, layout)
    for name, tensor in found.after.items():
        moved = not torch.equal(tensor, found.before[name])
        assert moved is (int(name.split(".")[1]) not in recipe.frozen), name


@pytest.mark.parametrize("layout", [v for v in VARIED if v.data_parallel == 1], ids=str)
def test_running_statistics_see_every_micro_batch_once(layout: Layout) -> None:
    found = check(DOUBLE._replace(norm="batch"), layout)
    assert found.after["layers.3.norm.num_batches_tracked"] == STEPS * layout.micro_batches


@varied
def test_parameters_have_the_settings_of_their_group(layout: Layout) -> None:
    check(
        DOUBLE,
        layout,
        optimizer=adamw,
        param_groups=lambda name, shape: _decay(shape),
        plain={"optimizer": _grouped_by_shape},
    )


def _decay(shape: torch.Size) -> dict[str, float]:
    return {"weight_decay": 0.1 if len(shape) > 1 else 0.0, "lr": 0.02 if len(shape) > 1 else 0.01}


def _grouped_by_shape(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return adamw([{**group, **_decay(group["params"][0].shape)} for group in groups])


@varied
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_the_learning_rate_follows_its_schedule(layout: Layout, make: Callable[..., Any]) -> None:
    check(DOUBLE, layout, optimizer=make, lr_scheduler=_halving, plain={"optimizer": partial(_with_schedule, make)})


def _halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _with_schedule(make: Callable[..., torch.optim.Optimizer], groups: Any) -> torch.optim.Optimizer:
    optimizer = make(groups)
    schedule = _halving(optimizer)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer
