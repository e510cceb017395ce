"""Does a schedule take as long as it is said to? Layers that sleep, F = I = W = 20 ms a rank, against the simulator.

    python -m benchmarks.sleeping [--ranks 4] [--micro-batches 8 16] [--schedules 1f1b interleaved-1f1b:2] [--json]

What is simulated is a step's program, from its first action to its last; the same is measured, and the whole of
train_batch, with reading, both agreements and the update, is reported beside it. Costs are exactly 20 ms and the
measured latency of the link: nothing is fitted.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

from benchmarks.ranks import Row, median, parser_of, report, run_ranks

SECONDS = 0.020
STEPS = 7
BAR = 1.03


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved-1f1b:2"], metavar="NAME[:V]")
    options = parser.parse_args()
    if options.worker:
        worker(options.schedules[0], options.micro_batches[0])
        return 0
    rows = []
    for name, micro_batches in itertools.product(options.schedules, options.micro_batches):
        arguments = ["--schedules", name, "--micro-batches", str(micro_batches)]
        found = run_ranks("benchmarks.sleeping", options.ranks, arguments)
        label = f"{name} p{options.ranks} m{micro_batches}, train_batch {found['whole']:.4f}"
        rows.append(Row(label, found["measured"], found["simulated"], BAR))
    return report(rows, as_json=options.json, unit="s")


def worker(name: str, micro_batches: int) -> None:
    import torch

    from benchmarks.sleeping_layers import Sleep, stay_on_a_core, wake_exactly
    from pipeline import LayerSpec, PipelineModule, initialize
    from pipeline.profiler import measure_hop
    from schedules import Costs, simulate

    wake_exactly()
    stay_on_a_core(int(os.environ["RANK"]))
    name, _, stages = name.partition(":")
    per_rank = int(stages or 1)
    world = int(os.environ["WORLD_SIZE"])
    share = SECONDS / per_rank
    last = world * per_rank - 1
    module = PipelineModule(
        [LayerSpec(Sleep, share, share, share, last=i == last) for i in range(last + 1)],
        loss_fn=lambda output, target: output,
    )
    config = {"schedule": name, "stages_per_rank": per_rank, "micro_batches": micro_batches, "partition": "uniform"}
    engine = initialize(module, config=config, optimizer=torch.optim.SGD)
    items = itertools.repeat((torch.zeros(4, 8), None))
    engine.train_batch(items)
    times, whole = [], []
    for _ in range(STEPS):
        engine.mesh.world.barrier()
        started = time.perf_counter()
        engine.train_batch(items)
        whole.append(time.perf_counter() - started)
        times.append(engine.timeline().step_time)
    hop = measure_hop(engine.mesh, 4 * 8 * 4)
    simulated = simulate(engine.schedule, Costs(F=share, I=share, W=share, hop=hop)).step_time
    if engine.mesh.rank == 0:
        found = {"measured": median(times), "all": times, "whole": median(whole), "simulated": simulated, "hop": hop}
        print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
