"""Schedules that keep two copies of the layers: the copies never differ by a bit, and count once wherever it counts.

That they train as plain PyTorch does is in `test_parity.py`, with every other schedule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline import PipelineModule
from pipeline.batch import Item
from pipeline.module import Tie, Use
from pipeline.ties import with_twins
from tests.pipeline.layouts import Layout
from tests.pipeline.models import MakeOptimizer, Recipe, adamw, micro_batches, restless, sgd
from tests.pipeline.reference import Case, Outcome, agree, plainly
from tests.pipeline.running import everywhere, run, same_bits, start, transformer_case

STEPS = 3


@cache
def expected(recipe: Recipe, count: int, optimizer: MakeOptimizer = restless, copies: int = 1) -> Outcome:
    """What the shortest layout with two copies of the layers computes."""
    layout = Layout("dualpipe", 2 * copies, 2, count, data_parallel=copies)
    return run(transformer_case(recipe, count, steps=STEPS, optimizer=optimizer), layout)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("dualpipe", 4, 2, 5, options=(("overlapped", True),)),
        Layout("dualpipe", 6, 2, 5, recompute="every:2"),
        Layout("dualpipe", 4, 2, 1),
        Layout("chimera", 2, 2, 4, partition=(0, 0, 12)),
        Layout("chimera", 4, 2, 5, partition=(0, 3, 3, 9, 12), receive_ahead=0),
        Layout("chimera", 6, 2, 8, recompute=(0, 9, 11)),
    ],
    ids=str,
)
def test_one_set_of_bits_for_all_schedules_with_two_copies(layout: Layout, tied: bool) -> None:
    """``run`` also holds what every rank has, both copies of everything, against the state of rank 0."""
    case = transformer_case(Recipe(tied=tied), layout.micro_batches, steps=STEPS, optimizer=restless)
    assert same_bits(run(case, layout), expected(Recipe(tied=tied), layout.micro_batches))


@pytest.mark.parametrize("optimizer", [restless, adamw], ids=["restless", "adamw"])
def test_copies_of_the_pipeline_that_hold_two_copies_each(optimizer: MakeOptimizer) -> None:
    layout = Layout("chimera", 8, 2, 4, data_parallel=2)
    case = transformer_case(Recipe(), 4, steps=STEPS, optimizer=optimizer)
    assert same_bits(run(case, layout), expected(Recipe(), 4, optimizer, copies=2))


def test_one_micro_batch_gives_the_bits_of_one_copy() -> None:
    """It has one route, so that the sum over routes adds zeros."""
    case = transformer_case(Recipe(), 1, steps=STEPS, optimizer=restless)
    assert same_bits(run(case, Layout("chimera", 4, 2, 1)), run(case, Layout("1f1b", 4, 1, 1)))


@pytest.mark.parametrize("copies", [1, 2])
def test_gradients_are_clipped_by_a_norm_that_counts_both_copies_once(copies: int) -> None:
    layout = Layout("dualpipe", 4 * copies, 2, 5, data_parallel=copies)
    case = transformer_case(Recipe(dtype=torch.float64), 5, steps=STEPS, optimizer=sgd)
    found = run(case, layout, gradient_clipping=0.3)
    agree(found, plainly(case, layout, found.before, clip=0.3), str(layout))
    assert all(norm > 0.3 for norm in found.norms)


def test_running_statistics_are_those_of_the_first_copy() -> None:
    """It sees every other micro-batch; the second copy takes its values over at the end of a step."""
    layout = Layout("chimera", 4, 2, 5)
    case = transformer_case(Recipe(norm="batch"), 5, steps=STEPS, optimizer=restless)
    found = run(case, layout)
    assert same_bits(found, expected(Recipe(norm="batch"), 5))
    assert found.after["layers.3.norm.num_batches_tracked"] == STEPS * 3


def test_evaluation_runs_on_one_copy() -> None:
    """The bits of one process, and all outputs in order at one end."""
    case = transformer_case(Recipe(norm="batch"), 4)
    one, two = (everywhere(_evaluate, ranks, case, layout) for ranks, layout in _EVALUATED)
    assert {loss for loss, _ in two} == {one[0][0]}
    assert [outputs is not None for _, outputs in two] == [False, False, False, True]
    assert all(torch.equal(a, b) for a, b in zip(two[3][1], one[0][1], strict=True))


_EVALUATED = ((1, Layout()), (4, Layout("chimera", 4, 2, 4)))


def _evaluate(case: Case, layout: Layout) -> tuple[float, Any]:
    engine = start(case, layout)
    return engine.eval_batch(micro_batches(3, 50)).item(), engine.forward(micro_batches(3, 60))


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_checkpoint_holds_each_parameter_once_and_is_loaded_into_both_copies(tmp_path: Path, processes: bool) -> None:
    case = transformer_case(Recipe(norm="batch"), 4, steps=STEPS, optimizer=adamw)
    run_here = partial(everywhere, _stop_and_go, 4, case, str(tmp_path), processes=processes)
    results = [agrees for rank in run_here() for agrees in rank]
    assert results == [True] * len(results)


def _stop_and_go(case: Case, folder: str) -> list[bool]:
    """Whether a run through checkpoints in two layouts has the losses of one that never stopped, on this rank."""
    whole = start(case, Layout("dualpipe", 4, 2, 4))
    wanted = [whole.train_batch(case.items(step, 0)).item() for step in range(4)]
    engine = start(case, Layout("chimera", 4, 2, 4))
    found = [engine.train_batch(case.items(step, 0)).item() for step in range(2)]
    engine.save_checkpoint(folder)
    engine = start(case, Layout("dualpipe", 4, 2, 4, partition=(0, 2, 5, 5, 12), recompute="every"))
    engine.load_checkpoint(folder)
    found += [engine.train_batch(case.items(step, 0)).item() for step in range(2, 4)]
    one = start(case, Layout("1f1b", 4, 1, 4))
    one.load_checkpoint(folder)
    state = one.full_state_dict()
    return [found == wanted, one.steps == 2, all(t.isfinite().all() for t in state.values())]


class Shared(nn.Module):
    """A layer with a parameter of its own and one that it shares with another layer."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.shared).tanh() * self.own


def sharing() -> PipelineModule:
    generator = torch.Generator().manual_seed(3)
    shared = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=generator))
    layers: list[nn.Module] = [Shared(shared), nn.Linear(4, 4, dtype=torch.float64), nn.Tanh(), Shared(shared)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                if parameter is not shared:
                    parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return PipelineModule(layers, functional.mse_loss)


def test_a_layer_that_shares_some_of_its_parameters() -> None:
    layout = Layout("chimera", 4, 2, 4)
    case = Case(sharing, lambda step, rank: _rows(step), STEPS, sgd)
    found = run(case, layout)
    agree(found, plainly(replace(case), layout, found.before), str(layout))


def _rows(step: int) -> list[Item]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 2, 3, 4, dtype=torch.float64, generator=generator)
    return [Item(inputs, targets) for inputs, targets in x]


def test_which_parameters_are_tied_to_themselves() -> None:
    module = sharing()
    assert with_twins(module, 1) == module.ties()
    assert with_twins(module, 2) == (
        Tie("layers.0.shared", tuple(Use(layer, "shared", copy) for layer in (0, 3) for copy in (0, 1))),
        Tie("layers.0.own", (Use(0, "own", 0), Use(0, "own", 1))),
        Tie("layers.1", (Use(1, None, 0), Use(1, None, 1))),
        Tie("layers.2", (Use(2, None, 0), Use(2, None, 1))),
        Tie("layers.3.own", (Use(3, "own", 0), Use(3, "own", 1))),
    )
