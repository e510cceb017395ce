"""A step of 50 million parameters on 2 data-parallel ranks by ZeRO 3, beside FSDP2 and DeepSpeed, in turn in one run.

    python -m benchmarks.zero_step [--json]

Seconds of a step on the slower rank, medians over rounds in which each contender makes one. Then what ZeRO 0 to 3
send: elements that a rank gave to collectives of its replicas in a step of 4 micro-batches, counted where they are
called, over those of the formula: 2Ψ(d-1)/d, the same, (m+1)Ψ(d-1)/d, and (g+r)Ψ(d-1)/d with the gathers and reductions
that the program holds.  Last, two pipelines of two ranks whose layers sleep and whose sums come 30 ms late: a step over
its simulation with such sums, and how many of them end before the step's last pass does, over all but the last stage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.ranks import Row, finish, median, missing, parser_of, report, run_ranks

RANKS, ROUNDS, MICRO_BATCHES = 2, 7, 4
TIME_BAR, SENT_BAR, SIMULATED_BAR = 1.0, 1.01, 1.03
SECONDS, LATE = 0.02, 0.03
"""Of each of F, I and W of a stage, and of a sum of its gradients."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--what", default="time", help="for --worker: time, sent or late")
    options = parser.parse_args()
    if options.worker:
        {"time": time_steps, "sent": count_sent, "late": late_sums}[options.what]()
        return 0
    codes = [0]
    for rows, unit in ((time_rows(), "s"), (sent_rows(), "M"), (late_rows(), "")):
        for row in rows:
            codes.append(report([row], as_json=options.json, unit=unit))
            sys.stdout.flush()
    return max(codes)


def time_rows() -> Iterator[Row]:
    """A step of ours over one of each peer."""
    found = run_ranks("benchmarks.zero_step", RANKS, ["--what", "time"], peers=True)
    for peer in ("FSDP2", "DeepSpeed"):
        if peer in found:
            yield Row(f"ZeRO 3, {RANKS} ranks: a step, over {peer}", found["pipeloom"], found[peer], TIME_BAR)
        else:
            missing(peer)


def time_steps() -> None:
    from torch import distributed

    from benchmarks.contenders import in_turn
    from benchmarks.zero_contenders import of_deepspeed, of_fsdp, of_pipeloom

    distributed.init_process_group("gloo")
    steps = {"pipeloom": of_pipeloom(RANKS, zero=3)[1], "FSDP2": of_fsdp(RANKS)}
    theirs = of_deepspeed(3)
    if theirs is not None:
        steps["DeepSpeed"] = theirs
    in_turn(steps, rounds=2)
    finish({name: median(values) for name, values in in_turn(steps, rounds=ROUNDS).items()})


def sent_rows() -> Iterator[Row]:
    """Elements that a rank sent, in millions, over the formula."""
    found = run_ranks("benchmarks.zero_step", RANKS, ["--what", "sent"])
    for name, (counted, formula) in found.items():
        yield Row(f"ZeRO {name}, {RANKS} ranks: elements sent", counted / 1e6, formula / 1e6, SENT_BAR)


def count_sent() -> None:
    from torch import distributed

    from benchmarks.counted import Counted
    from benchmarks.zero_contenders import PARAMETERS, of_pipeloom
    from schedules import Op

    distributed.init_process_group("gloo")
    found = {}
    each = PARAMETERS * (RANKS - 1) / RANKS
    for name, settings in {
        "0": {"zero": 0},
        "1": {"zero": 1},
        "2": {"zero": 2},
        "2, once a step": {"zero": 2, "zero_reduce_every": "step"},
        "3": {"zero": 3},
        "3, whole all step": {"zero": 3, "zero_whole_layers": 100, "zero_reduce_every": "step"},
    }.items():
        engine, step = of_pipeloom(RANKS, micro_batches=MICRO_BATCHES, items=MICRO_BATCHES, **settings)
        step()
        runner = engine._planned()
        with Counted(runner) as counted:
            step()
        ops = [
            instruction.op for instruction in runner.executor(train=True, micro_batches=MICRO_BATCHES).program.rows[0]
        ]
        times = {"0": 2, "1": 2, "2": MICRO_BATCHES + 1, "2, once a step": 2}.get(name)
        found[name] = counted.elements, each * (times or ops.count(Op.UNSHARD) + ops.count(Op.REDUCE_GRAD))
    finish(found)


def late_rows() -> Iterator[Row]:
    """Sums that come late, in the bubbles of the ranks that end first."""
    found = run_ranks("benchmarks.zero_step", 4, ["--what", "late"])
    yield Row("2 pipelines of 2, late sums: a step over its simulation", *found["step"], SIMULATED_BAR)
    yield Row("sums inside of bubbles, over stages but the last to end", *found["inside"], 1.0, exact=True)


def late_sums() -> None:
    """On each of 4 ranks."""
    import os
    import time
    from dataclasses import replace

    import torch

    from benchmarks.contenders import Problem, of_pipeloom
    from benchmarks.sleeping_layers import Sleep, stay_on_a_core, wake_exactly
    from pipeline.comm.behind import behind
    from pipeline.profiler import measure_hop
    from schedules import Costs, lower, simulate

    wake_exactly()
    stay_on_a_core(int(os.environ["RANK"]))
    aside = behind(torch.device("cpu"), threads=False)

    class Late:
        """Sums that take ``LATE`` seconds, behind the computation."""

        def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> object:
            return aside.start(lambda: (time.sleep(LATE), sums.all_reduce(tensor, async_op=True).wait())[0])

    batch = torch.zeros(16, 8)
    layers = [lambda last=last: Sleep(SECONDS, SECONDS, SECONDS, last=last) for last in (False, True)]
    task = Problem(layers, lambda output, _: output, batch, batch, MICRO_BATCHES)
    engine = of_pipeloom(task, schedule="1f1b", data_parallel=2, partition="uniform")
    engine.train_batch(task.items())
    runner, sums = engine._planned(), engine.mesh.split(engine.mesh.columns(), "late sums")
    for shards in runner.built.shards.values():
        for shard in shards:
            shard.ways = replace(shard.ways, gradients=Late())
    data, taken, inside = task.items(), [], []
    for _ in range(ROUNDS):
        engine.train_batch(data)
        timeline = engine.timeline()
        last = max(float(row.max()) for row in timeline.end)
        taken.append(timeline.step_time)
        inside.append(sum(span.track == "reduce" and span.end <= last for span in timeline.other))
    hop = measure_hop(engine.mesh, 4 * 8 * 4)
    costs = Costs(F=SECONDS, I=SECONDS, W=SECONDS, hop=hop, reduce=LATE)
    simulated = simulate(lower(engine.schedule, runner.sharing), costs)
    finish({"step": (median(taken), simulated.step_time), "inside": (median(inside), engine.mesh.pipe - 1)})


if __name__ == "__main__":
    sys.exit(main())
