"""What does a runtime add to an action?  Linear stages of width 8: ours, torch's, DeepSpeed's, and none at all.

    python -m benchmarks.overhead [--ranks 2 4] [--json]

Wall: microseconds a compute action of a whole step of 64 micro-batches, over gloo and over shared memory, beside
torch's and DeepSpeed's over gloo, and beside the same tensors and messages written out by hand (benchmarks/floor.py).
Processor time: with every transfer replaced by nothing, what a step takes beyond its bare tensor operations, ours
beside torch's.  All contenders run in the same processes, one after the other in every round; medians of the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.contenders import Step, in_turn, of_deepspeed, of_pipeloom, of_torch
from benchmarks.floor import MICRO_BATCHES, SCHEDULES, actions_of_a_rank, bare, problem
from benchmarks.ranks import Row, finish, median, missing, parser_of, report, run_ranks

ROUNDS, REPEAT = 9, 3


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    options = parser.parse_args()
    if options.worker:
        worker(options.schedules[0], options.ranks[0])
        return 0
    rows = []
    for ranks in options.ranks:
        for name in options.schedules:
            found = run_ranks("benchmarks.overhead", ranks, ["--ranks", str(ranks), "--schedules", name], peers=True)
            if name == "1f1b" and "DeepSpeed" not in found["wall"]:
                missing("DeepSpeed")
            rows += rows_of(f"{name} p{ranks}", found["wall"], found["cpu"], found["tensors"])
    return report(rows, as_json=options.json, unit="µs")


def rows_of(label: str, wall: Mapping[str, float], cpu: Mapping[str, float], tensors: float) -> list[Row]:
    """Microseconds an action; the time of the bare tensors is told beside it."""
    gloo, bars = wall["gloo"], {"by hand": 1.15, "torch": 0.9, "DeepSpeed": 0.6}
    label = f"{label} (tensors {tensors:.0f})"
    beyond = {name: cpu[name] - cpu["by hand"] for name in ("ours", "torch")}
    return [
        *(Row(f"{label} gloo over {peer}", gloo, wall[peer], bar) for peer, bar in bars.items() if peer in wall),
        Row(f"{label} shared memory over torch", wall["shm"], wall["torch"], 0.5),
        Row(f"{label} processor, beyond tensors, over torch", beyond["ours"], beyond["torch"], 1 / 3),
    ]


def worker(name: str, ranks: int) -> None:
    import torch

    from schedules import build

    torch.set_num_threads(1)
    schedule = build(name, ranks=ranks, micro_batches=MICRO_BATCHES, stages_per_rank=SCHEDULES[name])
    task = problem(schedule)
    settings = {"schedule": name, "stages_per_rank": SCHEDULES[name], "partition": "uniform"}
    engines = {link: of_pipeloom(task, **settings, link=link, nonfinite_loss="ignore") for link in ("gloo", "shm")}
    cuts = range(schedule.num_stages + 1)
    steps: dict[str, Step] = {link: partial(engine.train_batch, task.items()) for link, engine in engines.items()}
    steps |= {"torch": of_torch(task, schedule, cuts), "by hand": bare(task, schedule)}
    if name == "1f1b" and (deepspeed := of_deepspeed(task, cuts)) is not None:
        steps["DeepSpeed"] = deepspeed
    in_turn(steps, rounds=2)
    actions = actions_of_a_rank(schedule)
    wall = {name: median(times) / actions * 1e6 for name, times in in_turn(steps, rounds=ROUNDS, repeat=REPEAT).items()}
    silent: dict[str, Step] = {"by hand": bare(task, schedule, messages=False), "torch": steps["torch"]}
    with no_transfers(engines["gloo"].mesh.link):
        silent["ours"] = steps["gloo"]
        cpu = {name: mean_over_ranks(taken) / actions * 1e6 for name, taken in processor_time(silent).items()}
    finish({"wall": wall, "cpu": cpu, "tensors": cpu["by hand"]})


def processor_time(steps: Mapping[str, Step]) -> dict[str, float]:
    """Seconds of this thread's processor time in a step of each: medians, in turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            started = time.thread_time()
            for _ in range(REPEAT):
                step()
            found[name].append((time.thread_time() - started) / REPEAT)
    return {name: median(times) for name, times in found.items()}


def mean_over_ranks(seconds: float) -> float:
    import torch
    from torch import distributed

    total = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


@contextmanager
def no_transfers(link: Any) -> Iterator[None]:
    """Let every message of pipeloom's link and of torch's runtime be nothing; agreements between steps go on."""
    from torch.distributed.pipelining import schedules as runtime

    from pipeline.links.protocol import DONE, LANE_AGREEMENT

    def only_agreements(method: Callable[..., object]) -> Callable[..., object]:
        def call(self: object, peer: int, tensor: object, lane: int) -> object:
            return method(self, peer, tensor, lane) if lane == LANE_AGREEMENT else DONE

        return call

    kind = type(link)
    with (
        mock.patch.object(kind, "send", only_agreements(kind.send)),
        mock.patch.object(kind, "receive", only_agreements(kind.receive)),
        mock.patch.object(runtime, "_batch_p2p", _none),
    ):
        yield


def _none(operations: object, desc: object = None) -> list[object]:
    return []


if __name__ == "__main__":
    sys.exit(main())
