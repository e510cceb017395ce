"""Ranks are killed while they train: does every run end as an undisturbed one does?

    python -m benchmarks.crash [--runs 30] [--seed 0] [--json]

Under torchrun with restarts, two copies of a pipeline of two ranks train for 12 steps of zb-h1 with AdamW and ZeRO 1 in
fp64, and save after every second one, while training goes on.  In each run a rank drawn by lot is killed (SIGKILL) at a
moment drawn by lot: before or after a call of a forward, a deferred gradient of weights, a send, a reduction, the
writing of files, a renaming, or after a time.  Where loading is to be the moment, it is the second to come.  `loss`:
the last loss over that of a run that nobody kills, 1 to the last bit.  `lost`: steps that were in a whole checkpoint
when the rank died and yet were done again, plus 1.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ranks import Row, parser_of, report

PLACES = ("forward", "weights", "send", "reduction", "writing", "renaming", "loading", "time")
RANKS, STEPS = 4, 12


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        train(Path(os.environ["CRASH_FOLDER"]), json.loads(os.environ["CRASH_DEATHS"]))
        return 0
    draw = random.Random(options.seed)
    undisturbed = run([])["loss"]
    rows = []
    for number in range(options.runs):
        place = PLACES[number % len(PLACES)]
        deaths = [drawn(draw, place)]
        if place == "loading":
            deaths.insert(0, {**drawn(draw, "renaming"), "call": draw.randint(6, 8)})  # when there is what to load
        found = run(deaths)
        last = deaths[-1]
        name = f"{number}: rank {last['rank']}, {place} {last['call']}, {'after' if last['after'] else 'before'}"
        died = found["deaths"] == len(deaths)
        rows.append(Row(f"{name}: loss", found["loss"], undisturbed if died else float("nan"), 1.0, exact=True))
        rows.append(Row(f"{name}: lost", 1 + found["lost"], 1, 1.0))
    return report(rows, as_json=options.json, unit="")


def drawn(draw: random.Random, place: str) -> dict[str, Any]:
    """Which rank dies where; ``call`` counts the calls of the place, or tenths of a second."""
    most = {"writing": 4, "renaming": 8, "loading": 1, "reduction": 12, "time": 8}.get(place, 40)
    rank = 0 if place == "renaming" else draw.randrange(RANKS)  # only rank 0 renames
    return {"place": place, "rank": rank, "call": draw.randint(1, most), "after": draw.random() < 0.5}


def run(deaths: list[dict[str, Any]]) -> dict[str, Any]:
    """One run under torchrun: its last loss, how many ranks were killed, and how many safe steps were lost by that."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=3", "--monitor-interval=0.1", "-m", "benchmarks.crash", "--worker"]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "CRASH_FOLDER": folder, "CRASH_DEATHS": json.dumps(deaths),
        }  # fmt: skip
        done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"a run with {deaths} failed:\n{done.stderr[-6000:]}")
        return json.loads((Path(folder) / "told").read_text())


# -- in the ranks --------------------------------------------------------------------------------------------


def train(folder: Path, deaths: list[dict[str, Any]]) -> None:
    import torch
    from torch import nn
    from torch.nn import functional

    from pipeline import LayerSpec, PipelineModule, initialize

    past = sorted(folder.glob("died-*"))
    if len(past) < len(deaths):
        arm(deaths[len(past)], folder)
    layers = [layer for _ in range(4) for layer in (LayerSpec(nn.Linear, 64, 64, dtype=torch.float64), nn.Tanh())]
    config = {
        "schedule": "zb-h1", "data_parallel": 2, "zero": 1, "micro_batches": 4, "partition": "uniform",
        "device": "cpu", "timeout": 20, "save_to": folder / "checkpoints", "save_every": "2 steps", "save_keep": 3,
    }  # fmt: skip
    engine = initialize(
        PipelineModule(layers, functional.mse_loss), config=config, optimizer=partial(torch.optim.AdamW, lr=0.01)
    )
    safe = max((json.loads(path.read_text()) for path in past), default=0)
    lost = max(0, safe - engine.steps)
    loss = float("nan")
    while engine.steps < STEPS:
        generator = torch.Generator().manual_seed(1000 * engine.steps + engine.mesh.data_rank)
        batch = [tuple(torch.randn(2, 4, 64, dtype=torch.float64, generator=generator)) for _ in range(4)]
        loss = float(engine.train_batch(batch))
    engine.finish_saving()
    if engine.mesh.rank == 0:
        (folder / "told").write_text(json.dumps({"loss": loss, "deaths": len(past), "lost": lost}))


def arm(death: dict[str, Any], folder: Path) -> None:
    """Let this rank die as was drawn, if it is the one."""
    from torch import nn
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    from pipeline.gradients.queue import WeightGradQueue
    from pipeline.links.distributed_group import DistributedGroup
    from pipeline.links.shared_link import SharedLink

    if int(os.environ["RANK"]) != death["rank"]:
        return
    if death["place"] == "time":
        threading.Thread(target=die_later, args=(death["call"] / 10, folder), daemon=True).start()
        return
    owner, names = {
        "forward": (nn.Tanh, ["forward"]),
        "weights": (WeightGradQueue, ["drain"]),
        "send": (SharedLink, ["send"]),
        "reduction": (DistributedGroup, ["reduce_scatter", "all_reduce"]),
        "writing": (FileSystemWriter, ["write_data"]),
        "renaming": (Path, ["rename", "replace", "unlink"]),
        "loading": (FileSystemReader, ["read_data"]),
    }[death["place"]]
    left = [death["call"]]
    for name in names:
        setattr(owner, name, fatal(getattr(owner, name), left, death["after"], folder))


def fatal(call: Any, left: list[int], after: bool, folder: Path) -> Any:
    """A call in which the process dies when the count that is ``left`` has come to its end."""

    def called(*args: Any, **others: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            die(folder)
        result = call(*args, **others)
        if left[0] == 0:
            die(folder)
        return result

    return called


def die_later(seconds: float, folder: Path) -> None:
    time.sleep(seconds)
    die(folder)


def die(folder: Path) -> None:
    """Note what is safe, by the names that only whole checkpoints have, and end at once."""
    safe = max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*[0-9]")), default=0)
    number = len(list(folder.glob("died-*")))
    with open(folder / f"died-{number}", "w", encoding="utf-8") as file:
        file.write(json.dumps(safe))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
