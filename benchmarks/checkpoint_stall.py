"""What does saving cost the steps behind which a checkpoint is written?

    python -m benchmarks.checkpoint_stall [--rounds 15] [--json]

The demo's GPT (4 blocks, width 128, sequences of 128 bytes) on 2 ranks by interleaved-1f1b with 2 stages a rank, AdamW.
In turn: steps in which nothing is saved, and as many steps of which the first is followed by a checkpoint that is
written while the others run, until it is safe.  `step`: the second over the first, medians over the rounds.  `stall`:
how long training stood still, while copies were taken, in parts of a step, plus 1.  `memory`: the copies in host memory
that a rank keeps for that, over what it has of the checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ranks import Row, finish, median, parser_of, report, run_ranks

BAR = 1.05


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.worker:
        measure(options.rounds, Path(os.environ["STALL_FOLDER"]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STALL_FOLDER"] = folder
        found = run_ranks("benchmarks.checkpoint_stall", 2, [f"--rounds={options.rounds}"])
    print(f"written in {found.pop('written'):.3f} s, over {found.pop('steps')} steps", file=sys.stderr)
    return report([Row(name, *numbers) for name, numbers in found.items()], as_json=options.json, unit="")


def measure(rounds: int, folder: Path) -> None:
    import torch

    from benchmarks.contenders import Problem, of_pipeloom
    from benchmarks.transformer import cross_entropy, gpt

    batch = torch.randint(256, (64, 129), generator=torch.Generator().manual_seed(0))
    task = Problem(
        gpt(4, 128, 128, 256), cross_entropy, batch[:, :-1], batch[:, 1:], 8, partial(torch.optim.AdamW, lr=1e-3)
    )
    engine = of_pipeloom(task, schedule="interleaved-1f1b", stages_per_rank=2, save_to=folder, save_keep=2)
    data = task.items()

    def steps(count: int, *, saving: bool) -> float:
        started = time.perf_counter()
        for number in range(count):
            engine.train_batch(data)
            if saving and number == 0:
                engine.save_checkpoint(wait=False)
        if saving:
            engine.finish_saving()
        return time.perf_counter() - started

    steps(3, saving=False)
    steps(3, saving=True)
    saver = engine._keeper.saver
    step = steps(5, saving=False) / 5
    count = agreed(2 + round(saver.seconds / step + 0.5), engine)
    plain: list[float] = []
    with_one: list[float] = []
    stalls: list[float] = []
    for _ in range(rounds):
        plain.append(steps(count, saving=False))
        with_one.append(steps(count, saving=True))
        stalls.append(saver.stall)
    own = sum(chunk.values.nbytes for chunk in kept_of(engine))
    step = median(plain) / count
    finish(
        {
            "step": (median(with_one) / count, step, BAR),
            "stall": (step + median(stalls), step, BAR),
            "memory": (saver.staged, own, 1.0),
            "written": saver.seconds,
            "steps": count,
        }
    )


def agreed(count: int, engine: Any) -> int:
    return int(engine.mesh.world.broadcast_object(count, 0))


def kept_of(engine: Any) -> list[Any]:
    from pipeline.entries import kept

    entries = kept(engine._planned(), engine.mesh.data_rank, engine.mesh.data)
    return [chunk for entry in entries.values() for chunk in entry.chunks]


if __name__ == "__main__":
    sys.exit(main())
