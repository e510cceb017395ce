"""What changes from one timeline to another, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schedules.causes import CAUSES
from schedules.table import KIND, KINDS, STAGE

if TYPE_CHECKING:
    from schedules.timeline import Timeline

NOTICEABLE = 0.0005
"""A change of less than 0.05 % is not worth a word."""


@dataclass(frozen=True, slots=True)
class Difference:
    """From ``before`` to ``after``."""

    before: Timeline
    after: Timeline

    @property
    def step_time(self) -> float:
        """Seconds by which the step becomes longer; negative where it becomes shorter."""
        return self.after.step_time - self.before.step_time

    @property
    def ratio(self) -> float:
        """The step time after, in step times before."""
        return self.after.step_time / self.before.step_time if self.before.step_time else 1.0

    @property
    def idle_by_cause(self) -> Mapping[str, tuple[float, float]]:
        """The mean share of the step that ranks lose to each cause, before and after."""
        before, after = (_mean_by_cause(timeline) for timeline in (self.before, self.after))
        return {cause: (before[cause], after[cause]) for cause in CAUSES}

    @property
    def passes(self) -> Mapping[str, tuple[float, float]]:
        """Mean seconds of the passes of each stage and kind, as "2F", before and after, where both have
        them."""
        before, after = (_mean_pass(timeline) for timeline in (self.before, self.after))
        return {name: (before[name], after[name]) for name in before if name in after}

    def text(self) -> str:
        """The difference in sentences, with times as shares, so that they hold in any unit."""
        sentences = [self._step(), self._causes(), self._work(), self._memory()]
        return " ".join(sentence for sentence in sentences if sentence)

    def _names(self) -> tuple[str, str]:
        """What to call the two, so that they can be told apart."""
        before, after = self.before, self.after
        if before.schedule.name != after.schedule.name:
            return before.schedule.name, after.schedule.name
        if before.kind != after.kind:
            return f"the {before.kind} step", f"the {after.kind} step"
        if before.schedule.stages_per_rank != after.schedule.stages_per_rank:
            return _with_stages(before), _with_stages(after)
        return "the first step", "the second step"

    def _step(self) -> str:
        before, after = self._names()
        change = self.ratio - 1
        how = f"takes {_percent(abs(change))} {'longer' if change > 0 else 'less time'} than {before}"
        if abs(change) < NOTICEABLE:
            how = f"takes as long as {before}"
        return f"{_capital(after)} {how}; {_changed('its bubble is', self.before.bubble, self.after.bubble)}."

    def _causes(self) -> str:
        changes = [(abs(after - before), cause, before, after) for cause, (before, after) in self.idle_by_cause.items()]
        parts = [
            f"{cause} {_percent(before)} to {_percent(after)}"
            for change, cause, before, after in sorted(changes, reverse=True)
            if change >= NOTICEABLE
        ]
        return f"Idle time by cause: {', '.join(parts)}." if parts else ""

    def _work(self) -> str:
        before, after = sum(self.before.busy), sum(self.after.busy)
        change = after / before - 1 if before else 0.0
        if abs(change) < NOTICEABLE:
            return ""
        sentence = f"Passes take {_percent(abs(change))} {'longer' if change > 0 else 'less time'} in total"
        ratios = {name: new / old - 1 for name, (old, new) in self.passes.items() if old}
        if ratios and self.before.schedule.num_stages == self.after.schedule.num_stages:
            name = max(ratios, key=lambda one: abs(ratios[one]))
            more = "more" if ratios[name] > 0 else "less"
            sentence += f"; {name} changes most, by {_percent(abs(ratios[name]))} {more}"
        return sentence + "."

    def _memory(self) -> str:
        before, after = max(self.before.peak_activations), max(self.after.peak_activations)
        if before == after:
            return ""
        return f"The fullest rank holds activations of {after:.4g} micro-batches instead of {before:.4g}."


def _mean_by_cause(timeline: Timeline) -> dict[str, float]:
    return {cause: float(np.mean([by[cause] for by in timeline.idle_by_cause])) for cause in CAUSES}


def _mean_pass(timeline: Timeline) -> dict[str, float]:
    """By stage and kind. Entries that are pairs do not tell how long each half took, and are left out."""
    schedule = timeline.schedule
    single = np.bincount(schedule.entries.of_action)[schedule.entries.of_action] == 1
    took = np.concatenate(timeline.end) - np.concatenate(timeline.start)
    actions, took = schedule.actions[single], took[schedule.entries.of_action[single]]
    cell = actions[:, STAGE] * len(KINDS) + actions[:, KIND]
    sums, counts = np.bincount(cell, weights=took), np.bincount(cell)
    return {
        f"{number // len(KINDS)}{KINDS[number % len(KINDS)]}": float(sums[number] / counts[number])
        for number in np.flatnonzero(counts).tolist()
    }


def _changed(what: str, before: float, after: float) -> str:
    if abs(after - before) < NOTICEABLE:
        return f"{what} {_percent(after)}, as before"
    return f"{what} {_percent(after)} of the step instead of {_percent(before)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _with_stages(timeline: Timeline) -> str:
    number = timeline.schedule.stages_per_rank
    return f"{timeline.schedule.name} with {number} stage{'s' if number != 1 else ''} a rank"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
