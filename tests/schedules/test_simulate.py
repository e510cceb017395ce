"""The simulator against an independent longest path, and what costs mean."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Costs, Entry, Kind, Schedule, build, lower, simulate
from schedules.action import actions_of
from schedules.errors import CostError
from tests.schedules.strategies import legal_schedules


def slowly(schedule: Schedule, costs: Costs) -> float:
    """The step time by walking the graph entry by entry."""
    graph = schedule.graph()
    ends: dict[Entry, float] = {}
    by_kind = costs.by_kind(schedule.num_stages)
    speed = costs.per_rank("speed", schedule.ranks)
    size = costs.per_stage("output_bytes", schedule.num_stages)
    for entry in networkx.topological_sort(graph):
        takes = sum(float(by_kind["FBIW".index(one.kind), one.stage]) for one in actions_of(entry))
        ready = [0.0]
        for before, _, kind in graph.in_edges(entry, data="kind"):
            ready.append(ends[before])
            if kind == "message":
                # The largest of the messages that the two entries may have for each other.
                sent = {
                    one.stage if one.kind is Kind.F else two.stage
                    for one in actions_of(before)
                    for two in actions_of(entry)
                    if one.micro_batch == two.micro_batch
                    and (one.kind is Kind.F) == (two.kind is Kind.F)
                    and two.kind is not Kind.W
                    and abs(one.stage - two.stage) == 1
                }
                ready[-1] += costs.hop + max(float(size[stage]) for stage in sent) / costs.bandwidth
        ends[entry] = max(ready) + takes / speed[graph.nodes[entry]["rank"]]
    return max(ends.values())


@given(legal_schedules(), st.integers(0, 1000))
@settings(max_examples=150)
def test_the_step_is_the_longest_path(schedule: Schedule, seed: int) -> None:
    random = np.random.default_rng(seed)
    f, i, w = random.uniform(0.1, 2.0, (3, schedule.num_stages)).tolist()
    costs = Costs(
        F=f, I=i, W=w, hop=float(random.uniform(0, 0.5)), bandwidth=2.0,
        output_bytes=random.uniform(0, 1, schedule.num_stages), speed=random.uniform(0.5, 2, schedule.ranks),
    )  # fmt: skip
    timeline = simulate(schedule, costs)
    assert timeline.step_time == pytest.approx(slowly(schedule, costs))
    assert timeline.kind == "predicted"
    assert timeline.hop == costs.hop
    for rank, row in enumerate(schedule.rows):
        assert len(timeline.start[rank]) == len(timeline.end[rank]) == len(row)
        assert np.all(timeline.start[rank][1:] >= timeline.end[rank][:-1])


def test_a_program_has_the_timeline_of_its_schedule() -> None:
    schedule = build("1f1b", ranks=3, micro_batches=4)
    costs = Costs(F=2.0, hop=0.5)
    assert simulate(lower(schedule), costs).step_time == simulate(schedule, costs).step_time


def test_a_hop_delays_messages_between_ranks_only() -> None:
    """Three ranks, two stages each: the path of one micro-batch has 5 hops there and 5 back, the loop included."""
    loop = build("interleaved-1f1b", ranks=3, micro_batches=1, stages_per_rank=2)
    assert simulate(loop, Costs(hop=10.0)).step_time == 6 * 3 + 10 * 10.0
    alone = build("interleaved-1f1b", ranks=1, micro_batches=1, stages_per_rank=2)
    assert simulate(alone, Costs(hop=10.0)).step_time == 2 * 3


@given(st.integers(2, 8), st.integers(1, 20), st.sampled_from([0.05, 0.5]))
def test_latency_of_gpipe_and_1f1b(p: int, m: int, hop: float) -> None:
    """GPipe pays every hop once each way; 1F1B waits 2(p - 1) hops for every p micro-batches when p divides m."""
    gpipe = simulate(build("gpipe", ranks=p, micro_batches=m), Costs(hop=hop)).step_time
    assert gpipe == pytest.approx(3 * (m + p - 1) + 2 * (p - 1) * hop)
    if m % p == 0:
        one = simulate(build("1f1b", ranks=p, micro_batches=m), Costs(hop=hop)).step_time
        assert one == pytest.approx(3 * (m + p - 1) + 2 * hop * ((p - 1) * m / p + p - 2))


def test_costs_of_single_stages() -> None:
    schedule = build("gpipe", ranks=3, micro_batches=4)
    times = [1.0, 2.5, 0.5]
    timeline = simulate(schedule, Costs(F=times, I=0.0, W=0.0))
    assert timeline.step_time == sum(times) + 3 * max(times), "sum t + (m - 1) max t, forwards alone"
    assert timeline.busy == (4.0, 10.0, 2.0)
    assert simulate(schedule, Costs(F=np.array(times), I=0.0, W=0.0)).step_time == timeline.step_time


def test_what_costs_refuse() -> None:
    with pytest.raises(CostError, match=r"Costs.F\[1\] is -1; it must be a finite number"):
        Costs(F=[1, -1])
    for wrong in (float("nan"), float("inf"), "fast", None):
        with pytest.raises(CostError, match=r"Costs.hop is .*; it must be a finite number, 0 or more"):
            Costs(hop=wrong)  # type: ignore[arg-type]
    with pytest.raises(CostError, match=r"Costs.W has 3 numbers, the schedule has 2 stages; give one number"):
        simulate(build("1f1b", ranks=2, micro_batches=2), Costs(W=[1, 2, 3]))


def test_free_passes_make_an_empty_step() -> None:
    timeline = simulate(build("1f1b", ranks=2, micro_batches=2), Costs(F=0, I=0, W=0))
    assert timeline.step_time == timeline.bubble == timeline.span_bubble == 0.0
    assert sum(timeline.idle_by_cause[0].values()) == 0.0


def test_many_ranks_and_micro_batches() -> None:
    schedule = build("1f1b", ranks=64, micro_batches=1024)
    assert simulate(schedule).step_time == 3 * (1024 + 63)
    assert len(lower(schedule).row_starts) == 65
