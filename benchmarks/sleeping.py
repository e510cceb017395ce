"""Does a step take as long as is said?  Layers that sleep, F = I = W = 20 ms a rank, beside the simulator and torch.

    python -m benchmarks.sleeping [--ranks 4] [--micro-batches 8 16] [--schedules 1f1b interleaved-1f1b:2] [--json]
    python -m benchmarks.sleeping --ranks 8 --micro-batches 16 --schedules as-torch

What is simulated is a step's program, from its first action to its last; the same is measured, and the whole of
train_batch, with reading, both agreements and the update, is told beside it. Costs are exactly 20 ms and the measured
latency of the link: nothing is fitted. Where torch has the schedule too, whole steps of both are taken in turn.
"""

from __future__ import annotations

import itertools
import os
import sys
from functools import partial

from benchmarks.ranks import Row, finish, median, parser_of, report, run_ranks

SECONDS = 0.020
STEPS = 7
BAR = 1.03


AS_TORCH = ("gpipe", "1f1b", "interleaved-1f1b:2", "breadth-first:2", "interleaved-zb:2", "zb-v:2", "dualpipe-v:2")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved-1f1b:2"], metavar="NAME[:V]")
    options = parser.parse_args()
    if options.worker:
        worker(options.schedules[0], options.micro_batches[0])
        return 0
    names = AS_TORCH if options.schedules == ["as-torch"] else options.schedules
    rows = []
    for name, micro_batches in itertools.product(names, options.micro_batches):
        arguments = ["--schedules", name, "--micro-batches", str(micro_batches)]
        found = run_ranks("benchmarks.sleeping", options.ranks, arguments)
        label = f"{name} p{options.ranks} m{micro_batches}"
        rows.append(Row(f"{label} over its simulation", found["program"], found["simulated"], BAR))
        if "torch" in found:
            rows.append(Row(f"{label} over torch, whole steps", found["ours"], found["torch"], 1.0))
    return report(rows, as_json=options.json, unit="s")


def worker(name: str, micro_batches: int) -> None:
    import torch

    from benchmarks.contenders import TORCH_NAMES, Problem, Step, in_turn, of_pipeloom, of_torch
    from benchmarks.sleeping_layers import Sleep, SleepApart, stay_on_a_core, wake_exactly
    from pipeline.profiler import measure_hop
    from schedules import Costs, simulate

    wake_exactly()
    stay_on_a_core(int(os.environ["RANK"]))
    name, _, stages = name.partition(":")
    per_rank = int(stages or 1)
    last = int(os.environ["WORLD_SIZE"]) * per_rank - 1
    share = SECONDS / per_rank
    batch = torch.zeros(4 * micro_batches, 8)

    def task(kind: type[Sleep] | type[SleepApart]) -> Problem:
        layers = [partial(kind, share, share, share, last=i == last) for i in range(last + 1)]
        return Problem(layers, lambda output, target: output, batch, batch, micro_batches)

    engine = of_pipeloom(task(Sleep), schedule=name, stages_per_rank=per_rank, partition="uniform")
    steps: dict[str, Step] = {"ours": partial(engine.train_batch, task(Sleep).items())}
    if name in TORCH_NAMES:
        steps["torch"] = of_torch(task(SleepApart), engine.schedule, range(last + 2))
    in_turn(steps, rounds=1)
    programs, times = [], {kind: [] for kind in steps}
    for _ in range(STEPS):
        for kind, taken in in_turn(steps, rounds=1).items():
            times[kind] += taken
        programs.append(engine.timeline().step_time)
    hop = measure_hop(engine.mesh, 4 * 8 * 4)
    simulated = simulate(engine.schedule, Costs(F=share, I=share, W=share, hop=hop)).step_time
    found = {kind: median(taken) for kind, taken in times.items()}
    finish({**found, "program": median(programs), "simulated": simulated, "hop": hop})


if __name__ == "__main__":
    sys.exit(main())
