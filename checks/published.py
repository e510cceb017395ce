"""Schedules against what is published of them, one line a row; code 1 where one contradicts.

    python -m checks.published

- Reference rows, timed by another simulator: makespan, span bubble and peak activations to 1e-6. Orders that are timed
  for given costs may be shorter in no more memory than the best published order of their name; the line says so.
- Tables 5 and 6 of the zero-bubble paper: the printed bubbles of 1F1B, ZB-H1 and ZB-H2 to four digits.
- The action lists of torch.distributed.pipelining, action for action; that of 1F1B but for the last rank, whose
  forwards torch numbers from 1.

The numbers are those of the tests, `tests/schedules/reference.json` and the modules beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from schedules import Costs, Timeline, build, simulate
from tests.schedules.test_reference import PRINTED, ROWS, TIMED, timed
from tests.schedules.test_torch_orders import ORDERS, order_of_torch, written

TOLERANCE = 1e-6
DIGITS = 0.00005  # half of the last one that is printed


class Line(NamedTuple):
    """One published row beside ours."""

    source: str
    what: str
    published: str
    ours: str
    verdict: str

    @property
    def failed(self) -> bool:
        return self.verdict.startswith("DIFFERS")


def reference() -> Iterator[Line]:
    for row in ROWS:
        timeline = timed(row)
        shape = "{ranks} x {micro_batches} x {stages_per_rank}, F {F} I {I} W {W} hop {hop}".format(**row)
        what = f"{row['schedule']}{' overlapped' * bool(row.get('overlapped'))}, {shape}"
        published = _numbers(row["makespan"], row["span_bubble"], max(row["peaks"]))
        ours = _numbers(timeline.step_time, timeline.span_bubble, max(timeline.peak_activations))
        yield Line("reference", what, published, ours, _verdict(row, timeline))


def _verdict(row: dict[str, Any], timeline: Timeline) -> str:
    apart = [timeline.step_time - row["makespan"], timeline.span_bubble - row["span_bubble"]]
    apart += [a - b for a, b in zip(timeline.peak_activations, row["peaks"], strict=True)]
    if max(map(abs, apart)) <= TOLERANCE:
        return "equal"
    alike = [other for other in ROWS if _shape(other) == _shape(row)]  # the paper's generator, the authors' own order
    peak = max(max(other["peaks"]) for other in alike)
    if row["schedule"] in TIMED and max(timeline.peak_activations) <= peak + TOLERANCE:
        least = min(other["makespan"] for other in alike)
        if timeline.step_time < row["makespan"] - TOLERANCE and timeline.step_time <= least + TOLERANCE:
            return f"shorter by {row['makespan'] - timeline.step_time:.4f}"
    return f"DIFFERS by {max(apart, key=abs):.7f}"


def _shape(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("schedule", "ranks", "micro_batches", "F", "I", "W", "hop"))


def _numbers(*numbers: float) -> str:
    return "  ".join(f"{number:11.6f}" for number in numbers)


def printed() -> Iterator[Line]:
    for line in PRINTED.strip().splitlines()[1:]:
        model, *numbers = line.split()
        micro_batches, costs = int(numbers[0]), Costs(*map(float, numbers[1:5]))
        for name, bubble in zip(("1f1b", "zb-h1", "zb-h2"), map(float, numbers[5:]), strict=True):
            found = simulate(build(name, ranks=8, micro_batches=micro_batches), costs).span_bubble
            verdict = "equal" if abs(found - bubble) <= DIGITS else f"DIFFERS by {found - bubble:.6f}"
            yield Line("printed", f"{name}, {model}, 8 x {micro_batches}", f"{bubble:.4f}", f"{found:.6f}", verdict)


def of_torch() -> Iterator[Line]:
    from torch.distributed.pipelining import schedules as module

    for theirs, shapes, options in (*ORDERS, ("Schedule1F1B", [(1, 4, 8), (1, 8, 32)], {})):
        if not hasattr(module, theirs):
            yield Line("torch", theirs, "", "", "this torch has none")
            continue
        for stages, ranks, micro_batches in shapes:
            order = order_of_torch(getattr(module, theirs), ranks, stages, micro_batches)
            shape = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages}
            own = written(build(theirs, **shape, **options))
            counts = [f"{sum(map(len, rows))} actions" for rows in (order, own)]
            same = "equal"
            if theirs == "Schedule1F1B":
                order, same = order[:-1], "equal but for the last rank"
                own = own[:-1]
            wrong = [rank for rank, (a, b) in enumerate(zip(order, own, strict=True)) if a != b]
            verdict = f"DIFFERS on rank {wrong[0]}" if wrong else same
            yield Line("torch", f"{theirs}, {ranks} x {micro_batches} x {stages}", *counts, verdict)


def main() -> int:
    lines = []
    print(f"{'source':11}{'what: ranks x micro-batches x stages a rank':74}{'published':>39}   ours")
    for line in (*reference(), *printed(), *of_torch()):
        print(f"{line.source:11}{line.what:74}{line.published:>39}   {line.ours:>39}   {line.verdict}")
        lines.append(line)
    failed = [line for line in lines if line.failed]
    shorter = sum(line.verdict.startswith("shorter") for line in lines)
    print(f"\n{len(lines)} rows, {shorter} of them shorter than published in no more memory, {len(failed)} that differ")
    return 1 if failed or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
