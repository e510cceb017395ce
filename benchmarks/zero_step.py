"""A step of 50 million parameters on 2 data-parallel ranks by ZeRO 3, beside FSDP2 and DeepSpeed, in turn in one run.

    python -m benchmarks.zero_step [--json]

Seconds of a step on the slower rank, medians over rounds in which each contender makes one. Then what ZeRO 0 to 3
send: elements that a rank gave to collectives of its replicas in a step of 4 micro-batches, counted where they are
called, over those of the formula: 2Ψ(d-1)/d, the same, (m+1)Ψ(d-1)/d, and (g+r)Ψ(d-1)/d with the gathers and reductions
that the program holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.ranks import Row, finish, median, missing, parser_of, report, run_ranks

RANKS, ROUNDS, MICRO_BATCHES = 2, 7, 4
TIME_BAR, SENT_BAR = 1.0, 1.01


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--what", default="time", help="for --worker: time or sent")
    options = parser.parse_args()
    if options.worker:
        time_steps() if options.what == "time" else count_sent()
        return 0
    codes = [0]
    for rows, unit in ((time_rows(), "s"), (sent_rows(), "M")):
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


if __name__ == "__main__":
    sys.exit(main())
