"""How much a step keeps: flat over the micro-batches where it is said to be, and what the simulator says everywhere.

    python -m benchmarks.memory [--json]

First, peak memory: of 2 ranks as processes over gloo, with layers that save 4 MiB a micro-batch on each rank, anew for
each number of micro-batches. Counted are the bytes of all tensors that live at once during a step, by
torch's own allocator, and beside it how far the resident memory rises over what it was before; medians over the steps.
`1f1b` and `zb-h1` must need for 16, 32 and 64 micro-batches what they need for 8. `gpipe`, which keeps all of them,
shows that the measure can grow.

Then, live activations: of 4 ranks as threads, for every schedule by name that trains, and 4, 8 and 13 micro-batches
where it takes them. Each layer saves one tensor, which is counted until its memory is given back. The most that live on
any rank must be exactly what the simulator says of that rank, and so must the number after every single change.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.ranks import Row, median, parser_of, report, run_ranks

if TYPE_CHECKING:
    from benchmarks.live_layers import Course

FLAT, CONTROL = ("1f1b", "zb-h1"), "gpipe"
FEW, MANY = 8, (16, 32, 64)
ROWS, WIDTH = 2048, 128  # 1 MiB an activation, of which a rank keeps four a micro-batch
LAYERS_A_RANK = 2
STEPS = 3
BAR = 1.05
RESIDENT_BAR = 1.25  # of ten tensors two: posted for messages, whose pages are taken when these arrive
RANKS, NUMBERS = 4, (4, 8, 13)
MIB = 1 << 20


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--schedule", default="1f1b", help="for --worker")
    parser.add_argument("--micro-batches", type=int, default=FEW, help="for --worker")
    options = parser.parse_args()
    if options.worker:
        worker(options.schedule, options.micro_batches)
        return 0
    codes = [0]
    for rows, unit in ((peak_rows(), "MiB"), (live_rows(), "")):
        for row in rows:
            codes.append(report([row], as_json=options.json, unit=unit))
            sys.stdout.flush()
    return max(codes)


# -- peak memory over micro-batches --------------------------------------------------------------------------


def peak_rows() -> Iterator[Row]:
    """The peak of each rank at each number of micro-batches, over that at the smallest."""
    # Every tensor in pages of its own, given back at once: what is resident is then what lives.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    for name in (*FLAT, CONTROL):
        few = _peaks(name, FEW)
        for number in MANY if name in FLAT else MANY[-1:]:
            found = _peaks(name, number)
            for what, bar in (("tensors", BAR), ("resident", RESIDENT_BAR)):
                for rank, (ours, base) in enumerate(zip(found[what], few[what], strict=True)):
                    label = f"{name} rank {rank}, {what}, m{number} over m{FEW}"
                    yield Row(label, ours / MIB, base / MIB, bar if name in FLAT else None)


def _peaks(name: str, micro_batches: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = run_ranks(
        "benchmarks.memory", 2, ["--schedule", name, "--micro-batches", str(micro_batches)]
    )
    return found


def worker(name: str, micro_batches: int) -> None:
    from benchmarks.live_layers import Living, engine_of, step
    from benchmarks.peaks import resident_bytes, tensor_bytes

    settings = {"schedule": name, "micro_batches": micro_batches, "link": "gloo"}
    engine = engine_of(settings, 2 * LAYERS_A_RANK, Living(), ROWS, WIDTH)
    step(engine, WIDTH)
    peaks: dict[str, list[float]] = {}
    for what, measure in (("resident", resident_bytes), ("tensors", tensor_bytes)):
        peaks[what] = []
        for _ in range(STEPS):
            engine.mesh.world.barrier()
            peaks[what].append(measure(lambda: step(engine, WIDTH)))
    by_rank = engine.mesh.world.all_gather_object({what: median(values) for what, values in peaks.items()})
    if engine.mesh.rank == 0:
        print(json.dumps({what: [rank[what] for rank in by_rank] for what in peaks}))


# -- live activations ----------------------------------------------------------------------------------------


def live_rows() -> Iterator[Row]:
    """For each schedule its peaks, and how many changes of all ranks and numbers of micro-batches are as simulated."""
    from schedules import names

    for name in names():
        every: list[Course] = []
        for number in NUMBERS:
            found = _courses(name, number)
            every += found
            if found:
                shown = max(found, key=lambda course: (abs(max(course.counted) - course.peak), course.peak))
                label = f"{name} p{RANKS} m{number}, peak of live activations"
                yield Row(label, max(shown.counted), shown.peak, 1.0, exact=True)
        if every:
            agreed = sum(course.agreed for course in every)
            changes = sum(max(len(course.counted), len(course.simulated)) for course in every)
            yield Row(f"{name} p{RANKS}, changes as simulated", agreed, changes, 1.0, exact=True)


def _courses(name: str, micro_batches: int) -> list[Course]:
    """Of all ranks and steps; none where the schedule does not train, or not with these micro-batches."""
    from benchmarks.live_layers import courses
    from pipeline import run_local
    from schedules import build
    from schedules.errors import ImpossibleShape

    try:
        schedule = build(name, ranks=RANKS, micro_batches=micro_batches)
    except ImpossibleShape:
        return []
    if schedule.forward_only:
        return []
    # As it was built: where a schedule chooses its stages, an engine that measures nothing begins with one a rank.
    settings = {"schedule": name, "micro_batches": micro_batches, "stages_per_rank": schedule.num_stages // RANKS}
    by_rank = run_local(courses, RANKS, settings, schedule.num_layer_groups, timeout=60.0)
    return [course for steps in by_rank for course in steps]


if __name__ == "__main__":
    sys.exit(main())
