"""Two nodes with a slow link between them: what crosses it, and what training by less than the whole sum costs.

    python -m benchmarks.two_nodes [--json]

The nodes are network namespaces of this machine, joined by a virtual cable that `tc … tbf` limits to 100 Mbit/s both
ways; torchrun starts 2 ranks on each.  Needs Linux, and the rights to make namespaces; says so where they are missing.

`training`: the loss of 5 steps with 2 pipelines of 2 ranks over both nodes, over that of one rank alone, to rounding.
`bytes`: what leaves one node in a step of a model of 4 copies, counted at the cable, by nodes over flat: of gradients,
of what ZeRO 3 gathers for an evaluation, and of gradients by powersgd over exact ones.  `time`: the same of the time of
a step, reported.  `demo`: nats a byte of the demo's GPT after 300 steps, as two copies on this machine: compressed by
powersgd of rank 16 after 50 exact steps, or by topk of 0.3 after 100, over exact; and with error feedback over without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.demo import learned
from benchmarks.ranks import Row, finish, median, parser_of, report

BYTES_BAR, POWERSGD_BAR = 0.70, 0.10
NATS = 0.05
RATE = "100mbit"
STEPS, ROUNDS, WIDTH = 3, 3, 512
FLAT = {"comm_gradients": "flat", "comm_parameters": "flat", "comm_states": "flat"}
BY_NODES = dict.fromkeys(FLAT, "hierarchical")
POWERSGD = {"comm_compress": "powersgd", "comm_rank": 16}
COMPRESSED = {
    "powersgd": ("--comm-compress=powersgd", "--comm-rank=16", "--comm-exact-steps=50"),
    "topk": ("--comm-compress=topk", "--comm-share=0.3", "--comm-exact-steps=100"),
}
TWO_COPIES = ("--data-parallel=2", "--schedule=1f1b", "--micro-batches=4")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=["links", "demo"], help="this half alone")
    options = parser.parse_args()
    if options.worker:
        across()
        return 0
    codes = [0]
    halves = {"links": link_rows, "demo": demo_rows}
    for name, rows in halves.items():
        if options.only in (None, name):
            for row, unit in rows():
                codes.append(report([row], as_json=options.json, unit=unit))
                sys.stdout.flush()
    return max(codes)


# -- over the cable ------------------------------------------------------------------------------------------


def link_rows() -> Iterator[tuple[Row, str]]:
    reason = impossible()
    if reason:
        print(f"two nodes cannot be made here: {reason}; these rows were not measured", file=sys.stderr)
        return
    with two_nodes() as nodes:
        found = run_on(nodes)
    yield Row("training, 2 pipelines of 2 over both nodes: loss", found.pop("loss"), trained(1), 1.0, exact=True), ""
    for name, (ours, flat, bar) in found.items():
        yield Row(name, ours, flat, bar), "MB" if "bytes" in name else "s"


def impossible() -> str:
    """Why namespaces cannot be made here, or nothing."""
    if sys.platform != "linux":
        return "this is not Linux"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (Debian: iproute2)"
    name = f"pipeloom{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return tried.stderr.strip()
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, which are also those of their ends of the cable."""
    ends = (f"pl{os.getpid()}a"[-13:], f"pl{os.getpid()}b"[-13:])
    try:
        for end in ends:
            _run("ip", "netns", "add", end)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, end in enumerate(ends, 1):
            _run("ip", "link", "set", end, "netns", end)
            inside = partial(_run, "ip", "netns", "exec", end)
            inside("ip", "addr", "add", f"10.77.0.{number}/24", "dev", end)
            inside("ip", "link", "set", "lo", "up")
            inside("ip", "link", "set", end, "up")
            inside("tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", RATE, "burst", "64kb", "latency", "200ms")
        yield ends
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def run_on(nodes: Sequence[str]) -> Any:
    """Run this benchmark's worker on 2 ranks of each node; the JSON of the first one's last line."""
    started = []
    root = str(Path(__file__).parents[1])
    for number, node in enumerate(nodes):
        command = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node-rank={number}", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29555"]
        command += ["-m", "benchmarks.two_nodes", "--worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": node,
                       "CABLE": node}  # fmt: skip
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    outputs = [process.communicate(timeout=900) for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("the ranks of two nodes failed:\n" + "\n".join(errors[-3000:] for _, errors in outputs))
    return json.loads(outputs[0][0].strip().splitlines()[-1])


def sent() -> int:
    """Bytes that have left this node over the cable."""
    return int(Path(f"/sys/class/net/{os.environ['CABLE']}/statistics/tx_bytes").read_text())


def across() -> None:
    """On each of 4 ranks: train in pipelines, then as 4 copies, by each way in turn."""
    found: dict[str, Any] = {"loss": trained(2)}
    ways = {"flat": FLAT, "by nodes": BY_NODES, "powersgd": {**FLAT, **POWERSGD}}
    steps = {name: copies(**settings)[1] for name, settings in ways.items()}
    gathers = {name: copies(zero=3, **ways[name])[2] for name in ("flat", "by nodes")}
    of_steps, of_gathers = counted(steps), counted(gathers)
    for number, unit in enumerate(("bytes", "time")):
        bar = BYTES_BAR if unit == "bytes" else None
        flat = of_steps["flat"][number]
        found[f"{unit}, gradients by nodes"] = of_steps["by nodes"][number], flat, bar
        found[f"{unit}, gradients by powersgd"] = of_steps["powersgd"][number], flat, bar and POWERSGD_BAR
        found[f"{unit}, ZeRO 3 gathers by nodes"] = of_gathers["by nodes"][number], of_gathers["flat"][number], bar
    finish(found)


def trained(copies: int) -> float:
    """The loss of the last of 5 steps on 8 items."""
    import torch
    from torch import nn

    from pipeline import LayerSpec, PipelineModule, initialize
    from pipeline.batch import Item

    linear = LayerSpec(nn.Linear, 32, 32, dtype=torch.float64)
    layers = [part for _ in range(4) for part in (linear, LayerSpec(nn.Tanh))]
    module = PipelineModule(layers, nn.functional.mse_loss)
    count = 8 // copies
    config = {"data_parallel": copies, "micro_batches": count, "partition": "uniform", "mesh_inside": "pipe"}
    engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(0)
    items = [Item(*torch.randn(2, 4, 32, generator=generator, dtype=torch.float64)) for _ in range(8)]
    own = items[engine.mesh.data_rank * count :][:count]
    for _ in range(5):
        loss = engine.train_batch(iter(own))
    return float(loss)


def copies(**settings: Any) -> tuple[Any, Any, Any]:
    """An engine of 4 copies of a model of a million parameters, its step and an evaluation."""
    import torch
    from torch import nn

    from pipeline import LayerSpec, PipelineModule, initialize

    module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)], nn.functional.mse_loss)
    config = {"data_parallel": 4, "micro_batches": 1, "partition": "uniform", **settings}
    engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=0.1))
    item = (torch.ones(1, WIDTH), torch.zeros(1, WIDTH))
    return engine, lambda: engine.train_batch(iter([item])), lambda: engine.eval_batch(iter([item]))


def counted(calls: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """MB that leave the first node and seconds of a call, medians over rounds in which each has its turn."""
    from torch import distributed

    for call in calls.values():
        call()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            distributed.barrier()
            started, before = time.perf_counter(), sent()
            for _ in range(STEPS):
                call()
            distributed.barrier()
            found[name].append(((sent() - before) / STEPS / 1e6, (time.perf_counter() - started) / STEPS))
    return {name: (median([b for b, _ in rounds]), median([s for _, s in rounds])) for name, rounds in found.items()}


# -- the demo ------------------------------------------------------------------------------------------------


def demo_rows() -> Iterator[tuple[Row, str]]:
    exact = loss_of_demo()
    for name, flags in COMPRESSED.items():
        with_it = loss_of_demo(*flags)
        yield Row(f"demo, {name}, over exact", with_it, exact, 1 + NATS / exact), "nats"
        without = loss_of_demo(*flags, "--no-comm-error-feedback")
        yield Row(f"demo, {name}, error feedback on over off", with_it, without, 1.0), "nats"


def loss_of_demo(*flags: str) -> float:
    """Of two copies of the demo's GPT, with as many items in a step as it has."""
    return learned(2, *TWO_COPIES, *flags, steps=300).loss


if __name__ == "__main__":
    sys.exit(main())
