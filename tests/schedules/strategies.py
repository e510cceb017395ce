"""Any legal schedule at all: random placement, routes, kinds and order, made by running ready actions at random."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from schedules import Action, Kind, Pair, Schedule


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Ranks, stages per rank, micro-batches."""
    return draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 40))


@st.composite
def legal_schedules(draw: st.DrawFn) -> Schedule:
    """Schedules of up to 4 ranks, 6 stages and 5 micro-batches that nobody would write, but that can run."""
    ranks, stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    chance = random.Random(draw(st.integers(0, 10_000)))
    rank_of_stage = [chance.randrange(ranks) for _ in range(stages)]
    cut = chance.randrange(1, stages) if stages > 1 and micro_batches > 1 and chance.random() < 0.5 else stages
    routes = [route for route in (tuple(range(cut)), tuple(range(cut, stages))) if route]
    route_of = [number % len(routes) for number in range(micro_batches)]
    forward_only = chance.random() < 0.2

    waiting: dict[Action, set[Action]] = {}
    for micro_batch in range(micro_batches):
        route = routes[route_of[micro_batch]]
        split = [chance.random() < 0.5 for _ in route]
        for place, stage in enumerate(route):
            forward = Action(stage, Kind.F, micro_batch)
            waiting[forward] = {Action(route[place - 1], Kind.F, micro_batch)} if place else set()
            if forward_only:
                continue
            backward = Action(stage, Kind.I if split[place] else Kind.B, micro_batch)
            waiting[backward] = {forward}
            if place + 1 < len(route):
                kind = Kind.I if split[place + 1] else Kind.B
                waiting[backward].add(Action(route[place + 1], kind, micro_batch))
            if split[place]:
                waiting[Action(stage, Kind.W, micro_batch)] = {backward}

    made: list[list[Action | Pair]] = [[] for _ in range(ranks)]
    while waiting:
        ready = [action for action, needs in waiting.items() if not needs & waiting.keys()]
        action = chance.choice(ready)
        rank = rank_of_stage[action.stage]
        beside = [other for other in ready if other != action and rank_of_stage[other.stage] == rank]
        if beside and chance.random() < 0.2:
            other = chance.choice(beside)
            made[rank].append(Pair(action, other))
            del waiting[other]
        else:
            made[rank].append(action)
        del waiting[action]
    return Schedule.from_rows("random", made, rank_of_stage, routes=routes, route_of_micro_batch=route_of)
