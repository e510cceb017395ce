"""The size of micro-batches while training runs: watched, and changed when layers cost otherwise than before."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from partition import OutOfMemory, Profile
from partition.drift import Seconds, first_belief
from partition.sizes import SizeWatch, Verdict, costs_at
from pipeline.config import PipelineConfig
from pipeline.plan import Plan
from pipeline.sizing import predicted_seconds, with_number
from pipeline.timed import timed
from schedules import facts
from schedules.errors import ScheduleError

__all__ = ["SizeBalancer"]

_CHANGED = 1.15
"""Ranks that are busy by this factor longer, or shorter, than when all was settled make it worth a look."""


class SizeBalancer:
    """One rank's part in it.  What the first rank decides, all heed; when to look they know from the same numbers."""

    def __init__(self, config: PipelineConfig) -> None:
        self._window = config.balance_window
        self._watch = SizeWatch(config.rows or 1, least_gain=config.balance_gain)
        self._busy: deque[Sequence[float]] = deque(maxlen=self._window)
        self._spans: deque[float] = deque(maxlen=self._window)
        self._usual: Sequence[float] | None = None  # seconds of each rank in a step, when all was settled
        self._promised: Verdict | None = None
        self.settled = False

    def reset(self) -> None:
        """Micro-batches, or layers, are others now."""
        self._busy.clear()
        self._spans.clear()
        self._usual, self.settled = None, False

    def due(self, busy: Sequence[float], span: float) -> bool:
        """Whether a step that took ``span`` seconds, of which ranks were ``busy``, shows that it is time to decide; the
        same on every rank."""
        self._busy.append(busy)
        self._spans.append(span)
        if len(self._busy) < self._window:
            return False
        now = self._now()
        if self._usual is not None:
            ratios = [seconds / before for seconds, before in zip(now, self._usual, strict=True) if before > 0]
            self.settled = all(1 / _CHANGED <= ratio <= _CHANGED for ratio in ratios)
        return not self.settled

    def decide(
        self, plan: Plan, config: PipelineConfig, took: Mapping[int, Seconds], base: Profile
    ) -> tuple[Verdict, Plan]:
        """On the first rank: how many micro-batches there are to be.

        ``took``: seconds of each layer; ``base``: what is known of them beside, at the present size.
        """
        seen = first_belief(base.layers, [took]).model_copy(update={"hop": base.hop})
        verdict = self._watch.decide(plan.micro_batches, seen, partial(_predicted, plan, config))
        costs = costs_at((config.rows or 1) // verdict.number, self._watch.known)
        return verdict, _plan_of(plan, verdict.number, costs)

    def heed(self, verdict: Verdict, rows: int) -> list[str]:
        """What is to be said of a verdict."""
        said = self._came_of_it()
        if verdict.why == "stay":
            self._usual, self.settled = self._now(), True
            return said
        size = rows // verdict.number
        if verdict.why == "look":
            return [*said, f"micro-batches: {verdict.number} of {size} rows, to see what that costs"]
        self._promised = verdict
        promise = f"a step should take {verdict.then:.4g} s instead of {verdict.now:.4g} s"
        return [*said, f"micro-batches: {verdict.number} of {size} rows from now on; {promise}"]

    def _came_of_it(self) -> list[str]:
        if self._promised is None:
            return []
        promised, self._promised = self._promised, None
        now = statistics.median(self._spans)
        return [f"micro-batches: with {promised.number} a step takes {now:.4g} s; {promised.then:.4g} s were expected"]

    def _now(self) -> list[float]:
        return [statistics.median(rank) for rank in zip(*self._busy, strict=True)]


def _predicted(plan: Plan, config: PipelineConfig, number: int, costs: Profile) -> float | None:
    try:
        return predicted_seconds(with_number(config, number), _plan_of(plan, number, costs), costs)
    except (OutOfMemory, ScheduleError):
        return None


def _plan_of(plan: Plan, number: int, costs: Profile) -> Plan:
    """The plan with another number of micro-batches; a schedule that is timed for costs is timed for these."""
    plan = replace(plan, micro_batches=number)
    if "costs" not in facts(plan.schedule).options:
        return plan
    begun = replace(plan, costs=None).build_schedule()
    return timed(plan, begun, costs, lambda _: plan.partition, free=False)
