"""What the profiler makes of the times that ranks measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from partition import Profile, stage_costs
from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.links.local import current
from pipeline.plan import Plan
from pipeline.profiler import profile_alone
from pipeline.speeds import rank_speeds, slowest_copies
from schedules import Timeline, simulate
from tests.pipeline.own_clock import spend


@pytest.mark.parametrize(
    ("seconds", "speeds"),
    [
        ([[1.0, 2.0], [1.04, 2.0], [0.97, 2.04], [1.0, 1.95]], (1, 1, 1, 1)),  # within what times scatter
        ([[1.0, 2.0], [1.0, 2.0], [1.5, 3.0], [1.0, 2.0]], (1, 1, 1 / 1.5, 1)),
        ([[0.5], [1.0], [1.0]], (2, 1, 1)),
        ([[1.0, 1.0, 2.0], [3.0, 1.0, 2.0], [1.0, 1.0, 2.0]], (1, 1, 1)),  # disturbed for a while
        ([[1.0, 1.0, 9.0], [1.6, 1.5, 9.0], [1.0, 1.0, 9.0]], (1, 1, 1)),  # most of the time it is as fast
        ([[1.0, 1.0, 9.0], [9.0, 1.5, 13.5], [1.0, 1.0, 9.0]], (1, 1 / 1.5, 1)),
        ([[1.0, 1.0], [3.0, 3.0]], (2, 2 / 3)),  # of two, the typical one is between them
        ([[0.0, 1.0], [0.0, 2.0], [0.0, 1.0]], (1, 0.5, 1)),  # a layer without any work tells nothing
        ([[0.0], [0.0]], (1, 1)),
        ([[2.0]], (1,)),
    ],
)
def test_ranks_that_take_longer_for_the_same_layers_are_slower(
    seconds: list[list[float]], speeds: tuple[float, ...]
) -> None:
    assert rank_speeds(seconds) == pytest.approx(speeds)


def test_of_several_copies_of_a_stage_the_slowest_counts() -> None:
    assert slowest_copies((1.0, 1.0, 1.0, 0.5), [(0, 2), (1, 3)]) == (1.0, 0.5)
    assert slowest_copies((1.0, 2.0, 1.0, 1.0), [(0, 2), (1, 3)]) == ()
    assert slowest_copies((1.0, 1.0, 0.5), [(0,), (1,), (2,)]) == (1.0, 1.0, 0.5)


@pytest.mark.usefixtures("own_time")
def test_a_slow_rank_is_seen_in_the_costs_the_cuts_and_the_prediction() -> None:
    def of_rank() -> tuple[Profile, Timeline, Plan]:
        module = PipelineModule([LayerSpec(Slower) for _ in range(7)], mse_loss)
        settings = {
            "schedule": "auto",
            "stages_per_rank": 1,
            "micro_batches": 4,
            "partition": "profile",
            "profile_runs": 3,
        }
        engine = initialize(module, config=settings, optimizer=torch.optim.SGD)
        engine.train_batch([(torch.ones(2, 4), torch.ones(2, 4))] * 4)
        assert engine.profile is not None
        return engine.profile, engine.predicted_timeline(), engine.plan

    (profile, predicted, plan), *others = run_local(of_rank, 3)
    assert all(other == (profile, plan) for other in [(one[0], one[2]) for one in others])
    assert profile.speeds == pytest.approx((1.0, 0.5, 1.0))
    assert [layer.forward for layer in profile.layers] == pytest.approx([0.010] * 7)
    assert plan.speeds == profile.speeds
    assert plan.partition.sizes == (3, 1, 3)
    made = plan.build_schedule()
    assert predicted.schedule.rows == made.rows
    assert predicted.step_time == simulate(made, stage_costs(profile, plan.partition, made)).step_time


class Slower(nn.Linear):
    """Takes 10 ms, on rank 1 twice as long."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        threads = current()
        spend(0.020 if threads is not None and threads.link.rank == 1 else 0.010)
        return super().forward(x)


def test_a_layer_that_raises_while_it_is_timed_is_named() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(7, -1)

    engine = initialize(PipelineModule([nn.Linear(4, 4), LayerSpec(Wrong)], mse_loss), optimizer=torch.optim.SGD)
    with pytest.raises(RuntimeError) as caught:
        engine.train_batch([(torch.ones(2, 4), torch.ones(2, 4))])
    assert caught.value.__notes__ == ["raised in layer 1 (Wrong), as layers were timed for the cuts"]


def test_of_an_input_cut_from_a_batch_its_own_part_is_kept() -> None:
    def kept(inputs: Tensor) -> int:
        module = PipelineModule([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)], mse_loss)
        return profile_alone(module, Item(inputs, torch.zeros(2, 4)), runs=1).layers[0].activation_bytes

    assert kept(torch.ones(64, 4)[:2]) == kept(torch.ones(2, 4)) == 2 * 4 * 4
