"""Build, check, lower, prove and simulate schedules of a million actions; and the simulator beside that of torch.

    python -m benchmarks.schedules_at_scale [--json] [--schedules NAME ...]

Every schedule by name with 64 ranks and 4,096 micro-batches must take less than 10 s and 2 GB, 1f1b with 1,024 ranks
less than 2 minutes and 8 GB; each in a process of its own, whose largest resident memory is what counts. Other work on
the machine only ever adds time, so a time beyond its bar is taken again, twice at most, and the best one counts; the
processor's time beside it, of one thread and with the imports, is what a machine that is quiet takes. The
simulator must need a twentieth of the processor time of torch's `_simulate_comms_compute` on the same schedules, with
64 ranks: both get what their own `build` or lowering made, and the times are microseconds a pass.

Orders that are timed for given costs, and searched, have shapes of their own that they are made for: not here.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.ranks import Row, report

SCALE = (64, 4096, 10.0, 2.0)  # ranks, micro-batches, seconds, GB
LARGE = (1024, 4096, 120.0, 8.0)
TRIES = 3
BESIDE_TORCH = {"1f1b": 1024, "interleaved-1f1b": 256, "zb-h1": 1024, "zb-v": 1024}  # micro-batches on 64 ranks
TIMES_FASTER = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write one JSON object a row")
    parser.add_argument("--schedules", nargs="+", metavar="NAME", help="only these with 64 ranks")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once[0], int(options.once[1]), int(options.once[2]))))
        return 0
    codes = []
    for row in rows(options.schedules or named()):
        codes.append(report([row], as_json=options.json, unit=""))
        sys.stdout.flush()
    return max(codes)


def rows(names: Sequence[str]) -> Iterator[Row]:
    """All of them, as they are measured."""
    for name in names:
        yield from scaled(name, *SCALE)
    yield from scaled("1f1b", *LARGE)
    yield from beside_torch()


def named() -> list[str]:
    """Every schedule that trains and is not timed for the costs it is given."""
    import schedules

    fixed = [name for name in schedules.names() if "costs" not in schedules.facts(name).options]
    return [name for name in fixed if not schedules.build(name, ranks=4, micro_batches=4).forward_only]


def once(name: str, ranks: int, micro_batches: int) -> dict[str, float]:
    """From the name to the timeline, in this process."""
    from schedules import build, lower, simulate

    started = time.perf_counter()
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)  # checks it
    program = lower(schedule)  # proves it
    simulate(program).bubble  # noqa: B018
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {
        "seconds": seconds,
        "processor": time.process_time(),
        "memory": memory,
        "actions": len(schedule.actions),
    }


def scaled(name: str, ranks: int, micro_batches: int, seconds: float, memory: float) -> Iterator[Row]:
    command = [sys.executable, "-m", "benchmarks.schedules_at_scale", "--once", name, str(ranks), str(micro_batches)]
    best: dict[str, float] = {}
    for _ in range(TRIES):
        done = subprocess.run(command, timeout=900, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        best = min(best or found, found, key=lambda one: one["seconds"])
        if best["seconds"] < seconds:
            break
    what = f"{name}, {ranks} x {micro_batches}, {best['actions']:,} actions"
    yield Row(f"{what}: s (processor {best['processor']:.1f})", best["seconds"], seconds, 1.0)
    yield Row(f"{what}: GB", best["memory"], memory, 1.0)


# -- beside torch --------------------------------------------------------------------------------------------


def beside_torch() -> Iterator[Row]:
    """Microseconds a pass, ours and torch's."""
    from torch.distributed.pipelining import schedules as theirs

    from schedules import build, simulate

    for name, micro_batches in BESIDE_TORCH.items():
        schedule = build(name, ranks=64, micro_batches=micro_batches)
        rank_of = schedule.rank_of_stage.__getitem__
        order = {rank: [theirs._Action.from_str(str(one)) for one in row] for rank, row in enumerate(schedule.rows)}
        lowered = theirs._add_send_recv(order, rank_of, schedule.num_stages)

        def peer(lowered: Any = lowered, rank_of: Any = rank_of, stages: int = schedule.num_stages) -> object:
            return theirs._simulate_comms_compute(lowered, rank_of, stages)

        ours = best_of(5, lambda schedule=schedule: simulate(schedule).step_time) * 1e6 / len(schedule.actions)
        other = best_of(1, peer) * 1e6 / len(schedule.actions)
        yield Row(f"simulate {name}, 64 x {micro_batches}: us, torch's", ours, other, 1 / TIMES_FASTER)


def best_of(times: int, work: Callable[[], object]) -> float:
    """The least processor time of some runs."""
    found = []
    for _ in range(times):
        gc.collect()
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
