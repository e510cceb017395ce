"""What a rank really computes: every pass of its stages, in order and with the time, beside the recorder's stamps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.engine import Engine
from pipeline.recorder import measured_timeline
from pipeline.stage import Stage
from schedules import Action, Kind
from schedules.action import actions_of


class Call(NamedTuple):
    """One pass that was computed, in seconds of the clock that the recorder uses."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Account:
    """One step on one rank: what was called, and what the recorder says of the same step.

    ``spans`` are those of the step's own Timeline: the action's text, start and end from the step's common start.
    """

    rank: int
    entries: tuple[Any, ...]
    """The schedule's row, which the recorder's stamps are aligned with."""
    calls: tuple[Call, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    begin: float
    end: float
    spans: tuple[tuple[str, float, float], ...]

    def objections(self) -> list[str]:
        """Everything in which the calls, the stamps and the row contradict each other; empty for one truth."""
        grouped = [actions_of(entry) for entry in self.entries]
        planned = [action for group in grouped for action in group]
        called = [call.action for call in self.calls]
        if called != planned:
            at = next((i for i, (a, b) in enumerate(zip(called, planned, strict=False)) if a != b), len(called))
            return [f"rank {self.rank} ran {_text(called[at:])}, its row says {_text(planned[at:])} (action {at})"]
        if not len(self.starts) == len(self.ends) == len(self.entries) == len(self.spans):
            return [f"rank {self.rank} has {len(self.starts)} stamps for {len(self.entries)} entries"]
        stamps = [self.begin, *(t for pair in zip(self.starts, self.ends, strict=True) for t in pair), self.end]
        wrong = [] if stamps == sorted(stamps) else [f"rank {self.rank}: stamps go back, or leave the step"]
        calls = iter(self.calls)
        for entry, group, start, end, span in zip(
            self.entries, grouped, self.starts, self.ends, self.spans, strict=True
        ):
            own = [next(calls) for _ in group]
            if not start <= own[0].start <= own[-1].end <= end:
                wrong.append(f"rank {self.rank}: {entry} ran outside of its stamps")
            if span[0] != str(entry) or abs((span[2] - span[1]) - (end - start)) > 1e-9:
                wrong.append(f"rank {self.rank}: the timeline shows {span} for {entry}")
        return wrong


def _text(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions[:4])) or "nothing more"


class Witness:
    """Listens to the stages of one rank's engine, which has been planned."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: list[Call] = []
        self._micro_batch: dict[int, int] = {}  # by passage
        self._kept: list[Any] = []  # so that no id is used twice within a step
        for stage in engine._planned().stages.values():
            self._listen(stage)

    def _listen(self, stage: Stage) -> None:
        forward, infer, backward, weight_gradients = (
            stage.forward, stage.infer, stage.backward, stage.weight_gradients
        )  # fmt: skip

        def noted(kind: Kind, passage: Any, run: Any) -> Any:
            start = time.perf_counter()
            result = run()
            action = Action(stage.number, kind, self._micro_batch[id(passage)])
            self._calls.append(Call(action, start, time.perf_counter()))
            return result

        def enters(place: Any, passage: Any) -> None:
            self._kept.append(passage)
            self._micro_batch[id(passage)] = place.micro_batch % self._engine.config.micro_batches

        def hear_forward(value: Any, place: Any, passage: Any, *rest: Any) -> Any:
            enters(place, passage)
            return noted(Kind.F, passage, lambda: forward(value, place, passage, *rest))

        def hear_infer(value: Any, place: Any, passage: Any, *rest: Any) -> Any:
            enters(place, passage)
            return noted(Kind.F, passage, lambda: infer(value, place, passage, *rest))

        def hear_backward(passage: Any, *rest: Any, defer: bool) -> Any:
            kind = Kind.I if defer else Kind.B
            return noted(kind, passage, lambda: backward(passage, *rest, defer=defer))

        def hear_weight_gradients(passage: Any) -> None:
            noted(Kind.W, passage, lambda: weight_gradients(passage))

        stage.forward, stage.infer = hear_forward, hear_infer  # type: ignore[method-assign]
        stage.backward, stage.weight_gradients = hear_backward, hear_weight_gradients  # type: ignore[method-assign]

    def account(self) -> Account:
        """What happened in the step that has just ended.  Collective over the pipeline."""
        step, executor = self._engine._run_steps.last
        stamps, rank, pipeline = executor.stamps, self._engine.mesh.pipe_rank, self._engine.mesh.pipeline
        # The engine shows the last training step; an evaluation is looked at in the same way.
        shown = self._engine.timeline() if step.train else measured_timeline(executor.schedule, stamps, pipeline, hop=0)
        spans = [s for s in shown.spans if s.track == "compute" and s.rank == rank]
        account = Account(
            rank,
            executor.schedule.rows[rank],
            tuple(self._calls),
            tuple(stamps.starts),
            tuple(stamps.ends),
            stamps.begin,
            stamps.end,
            tuple((s.action, s.start, s.end) for s in spans),
        )
        self._calls, self._micro_batch, self._kept = [], {}, []
        return account
