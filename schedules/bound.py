"""What no order can beat: a lower bound of the step time for a placement and its costs.

Three things hold for every order, whatever it does:

    a rank does all of its work, and only after a micro-batch has come the way to it;
    a micro-batch goes all the way there and back, and its W follows;
    passes of one kind on one stage run one after the other, and the last of them has a way before it and one behind.

With equal stages the first gives m(F + I + W) + (p - 1)(F/v + c), F, I, W being the times of a rank's whole share and c
the latency of a hop; (p/2 - 1)(F + c) beyond the work where two copies are entered from both ends. The bound allows
every backward to be split: for a schedule that runs whole backwards, it says what splitting could win.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.costs import Costs
from schedules.table import KIND, STAGE, B, F, I, W

if TYPE_CHECKING:
    from schedules.schedule import Schedule
    from schedules.timeline import Timeline

Floats = NDArray[np.float64]


def bound_of(timeline: Timeline) -> float:
    """Seconds that the passes of a timeline take at least, in any order on its placement."""
    if timeline.costs is not None:
        return lower_bound(timeline.schedule, timeline.costs)
    return lower_bound(timeline.schedule, least_costs(timeline), timeline.busy)


def lower_bound(schedule: Schedule, costs: Costs, work: Sequence[float] | None = None) -> float:
    """Seconds that passes of these costs take at least, in any order on this placement.

    ``work`` is what each rank has to do if that is known to be more. Raises CostError.
    """
    counts = [schedule.route_of_micro_batch.count(number) for number in range(len(schedule.routes))]
    return bound_on(
        schedule.ranks, schedule.rank_of_stage, schedule.routes, counts, costs,
        forward_only=schedule.forward_only, work=work,
    )  # fmt: skip


def bound_on(
    ranks: int,
    placed: Sequence[int],
    routes: Sequence[Sequence[int]],
    counts: Sequence[int],
    costs: Costs,
    *,
    forward_only: bool = False,
    work: Sequence[float] | None = None,
) -> float:
    """The same for a placement: the rank of each stage, and how many micro-batches take each route."""
    rank_of_stage = np.array(placed, dtype=np.intp)
    seconds = costs.seconds(placed, ranks)
    if forward_only:
        seconds[[I, W]] = 0.0
    entered = np.full(ranks, np.inf)  # when the first micro-batch is there
    left = np.full(ranks, np.inf if forward_only else 0.0)  # of its way when a rank is done
    load = np.zeros(ranks)
    longest = 0.0
    for route, count in zip(routes, counts, strict=True):
        if count:
            lanes = _lanes(np.array(route), rank_of_stage, seconds, costs)
            longest = max(longest, float((lanes.reach + count * lanes.seconds + lanes.rest).max()))
            passed, forwards = rank_of_stage[list(route)], slice(len(route))
            np.minimum.at(entered, passed, lanes.reach[forwards])
            if forward_only:
                np.minimum.at(left, passed, lanes.rest[forwards])
            np.add.at(load, passed, count * seconds[[F, I, W]].sum(axis=0)[list(route)])
    if work is not None:
        load = np.array(work)
    used = np.isfinite(entered)
    return max(longest, float((entered + load + left)[used].max(initial=0.0)))


class _Lanes(NamedTuple):
    """The passes of one micro-batch: its F in order, its I in reverse order, its W in the order of I."""

    seconds: Floats
    reach: Floats
    """From the start of the step to each of them."""
    rest: Floats
    """From the end of each of them to the end of the last."""


def _lanes(route: NDArray[np.intp], rank_of_stage: NDArray[np.intp], seconds: Floats, costs: Costs) -> _Lanes:
    there, back = seconds[F, route], seconds[I, route[::-1]]
    hop = np.where(np.diff(rank_of_stage[route]) != 0, costs.travel(len(rank_of_stage))[route[:-1]], 0.0)
    hop_back = hop[::-1] if back.any() else 0 * hop
    chain = np.concatenate([there, back])
    behind = np.concatenate([hop, [0.0], hop_back, [0.0]])  # what lies behind each pass of the chain
    reach = np.cumsum(chain + behind) - chain - behind
    weights = seconds[W, route[::-1]]

    to_w = reach[len(route) :] + back
    # Behind a pass of the chain comes the longest of all ways to the end of some W.
    ends = np.maximum.accumulate((to_w + weights)[::-1])[::-1]
    rest = np.concatenate([np.full(len(route), ends[0]), ends]) - reach - chain
    return _Lanes(np.concatenate([chain, weights]), np.concatenate([reach, to_w]), np.concatenate([rest, 0 * weights]))


def least_costs(timeline: Timeline) -> Costs:
    """The shortest pass of each kind on each stage of a timeline, as far as it ran by itself and not in a pair.

    A whole backward, which nobody saw in two parts, counts as I, and its W as nothing.
    """
    schedule = timeline.schedule
    entry = schedule.entries.of_action
    alone = np.bincount(entry)[entry] == 1
    took = (np.concatenate([*timeline.end, []]) - np.concatenate([*timeline.start, []]))[entry[alone]]
    actions = schedule.actions[alone]
    shortest = np.full((4, schedule.num_stages), np.inf)
    np.minimum.at(shortest, (actions[:, KIND], actions[:, STAGE]), took)
    weights = np.where(np.isfinite(shortest[B]), 0.0, shortest[W])
    found = [shortest[F], np.minimum(shortest[B], shortest[I]), weights]
    forward, input_grad, weight_grad = (np.where(np.isfinite(one), one, 0.0) for one in found)
    return Costs(F=forward, I=input_grad, W=weight_grad, hop=timeline.hop)
