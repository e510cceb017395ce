"""Schedules that are timed for costs are given the measured ones, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from partition import LayerCost, Profile, make_partition, predict_timeline, stage_costs
from pipeline.plan import Plan
from pipeline.timed import timed
from schedules import Costs, Schedule, build, simulate
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe
from tests.pipeline.running import everywhere, run, same_bits, start, transformer_case

MICRO_BATCHES = 5


def profile(seconds: Sequence[float]) -> Profile:
    layers = tuple(
        LayerCost(name=str(number), type="Layer", forward=time, input_grad=1.2 * time, weight_grad=0.8 * time)
        for number, time in enumerate(seconds)
    )
    return Profile(layers=layers, hop=0.1)


def plans(layout: Layout, **others: object) -> list[Plan]:
    def of_rank() -> Plan:
        engine = start(transformer_case(Recipe(), MICRO_BATCHES), layout, **others)
        assert engine.schedule.rows == engine._planned().schedule.rows
        return engine._planned().plan

    return everywhere(of_rank, layout.ranks)


def layers() -> int:
    return len(transformer_case(Recipe(), MICRO_BATCHES).model())


@pytest.mark.parametrize("stages_per_rank", [None, 1, 2])
def test_auto_is_timed_for_the_given_profile(stages_per_rank: int | None) -> None:
    given = profile([1.0 + 0.1 * (number % 3) for number in range(layers())])
    layout = Layout("auto", 2, stages_per_rank, MICRO_BATCHES)
    first, *others = plans(layout, partition="profile", profile=given)
    assert all(other == first for other in others)
    made = first.build_schedule()
    assert stages_per_rank in (None, made.stages_per_rank)
    costs = stage_costs(given, first.partition, made)
    assert first.costs == (costs.F, costs.I, costs.W)
    named = build("1f1b", ranks=2, micro_batches=MICRO_BATCHES)
    halves = stage_costs(given, plans(Layout("1f1b", 2), partition="profile", profile=given)[0].partition, named)
    assert stages_per_rank == 2 or simulate(made, costs).step_time <= simulate(named, halves).step_time


def test_v_half_is_timed_for_the_costs_of_its_stages() -> None:
    given = profile([1.0] * layers())
    plan = plans(Layout("v-half", 2, None, MICRO_BATCHES), partition="profile", profile=given)[0]
    assert plan.costs is not None
    assert [len(each) for each in plan.costs] == [4, 4, 4]
    assert plan.hop == 0.1


@pytest.mark.parametrize("schedule", ["auto", "v-half"])
def test_the_speeds_of_ranks_are_part_of_the_plan(schedule: str) -> None:
    given = profile([1.0 + 0.1 * (number % 3) for number in range(layers())])
    slow = given.model_copy(update={"speeds": (1.0, 0.5)})
    layout = Layout(schedule, 2, None, MICRO_BATCHES)
    first, *others = plans(layout, partition="profile", profile=slow)
    assert all(other == first for other in others)
    assert first.speeds == (1.0, 0.5)
    made = first.build_schedule()
    assert made.rows == build_for(first, stage_costs(slow, first.partition, made)).rows
    even = plans(layout, partition="profile", profile=given)[0]
    assert even.speeds == ()
    assert layers_on(1, first) < layers_on(1, even)


def build_for(plan: Plan, costs: Costs) -> Schedule:
    shape = {"ranks": plan.pipe, "micro_batches": plan.micro_batches, "stages_per_rank": plan.stages_per_rank}
    return build(plan.schedule, **shape, **{**dict(plan.schedule_options), "costs": costs})


def layers_on(rank: int, plan: Plan) -> int:
    return sum(plan.partition.sizes[stage] for stage in plan.build_schedule().stages_of_rank(rank))


def test_in_a_v_auto_is_no_longer_than_what_it_knows_by_name() -> None:
    given = profile([5, 9, 6, 7, 10, 4, 8, 6, 9, 5, 7, 6]).model_copy(update={"speeds": (1, 1, 1 / 1.5, 1)})
    shape = {"ranks": 4, "micro_batches": MICRO_BATCHES, "stages_per_rank": 2}
    named = build("zb-v", **shape)
    cuts = make_partition("profile", named, profile=given)
    begun = build("auto", **shape, placement="wave")
    plan = Plan(1, 4, "auto", (("placement", "wave"),), 2, MICRO_BATCHES, cuts.cuts, ())
    found = timed(plan, begun, given, lambda one: make_partition("profile", one, profile=given), free=False)
    assert found.cuts == cuts.cuts
    by_name = predict_timeline(given, cuts, named).step_time
    assert predict_timeline(given, found.partition, found.build_schedule()).step_time <= by_name


def test_others_have_no_costs() -> None:
    plan = plans(Layout("zb-h1", 2, None, MICRO_BATCHES), partition="profile", profile=profile([1.0] * layers()))[0]
    assert plan.costs is None


def test_auto_computes_the_same_bits() -> None:
    case = transformer_case(Recipe(), MICRO_BATCHES)
    given = profile([1.0 + 0.1 * (number % 3) for number in range(layers())])
    found = run(case, Layout("auto", 2, None, MICRO_BATCHES), partition="profile", profile=given)
    assert same_bits(found, run(case, Layout("1f1b", 1, micro_batches=MICRO_BATCHES)))


def test_auto_is_timed_at_the_first_batch() -> None:
    case = transformer_case(Recipe(), MICRO_BATCHES)

    def of_rank() -> tuple[float, Plan]:
        engine = start(case, Layout("auto", 2, None, MICRO_BATCHES), partition="profile", profile_runs=1)
        losses = [float(engine.train_batch(case.items(step, 0))) for step in range(2)]
        return losses[-1], engine._planned().plan

    (loss, plan), other = everywhere(of_rank, 2)
    assert other == (loss, plan)
    assert plan.costs is not None
