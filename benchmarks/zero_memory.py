"""What a data-parallel rank holds of 50 million parameters under ZeRO 0 to 3, beside the formula, FSDP2 and DeepSpeed.

    python -m benchmarks.zero_memory [--json]

First, bytes of parameters, gradients and optimizer state that live between two steps on each of 2 and of 4 ranks, over
those that the table of ZeRO gives: a vector is cut into equal parts, whose padding is in the 1 % allowed. Then resident
memory of one of 2 ranks with ZeRO 3, over FSDP2's and DeepSpeed's in runs of their own: at most since before the model
was made, and at most during a step beyond what there was before it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from benchmarks.ranks import Row, missing, parser_of, report, run_ranks

MIB = 1 << 20
HELD_BAR, PEAK_BAR = 1.01, 1.0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--what", default="held", help="for --worker: held, or whose peak")
    parser.add_argument("--zero", type=int, default=3, help="for --worker")
    options = parser.parse_args()
    if options.worker:
        held(options.zero) if options.what == "held" else peak(options.what)
        return 0
    codes = [0]
    for rows in (held_rows(), peak_rows()):
        for row in rows:
            codes.append(report([row], as_json=options.json, unit="MiB"))
            sys.stdout.flush()
    return max(codes)


def held_rows() -> Iterator[Row]:
    """Bytes that live between two steps, over those of the table."""
    for ranks in (2, 4):
        for zero in range(4):
            found = run_ranks("benchmarks.zero_memory", ranks, ["--zero", str(zero)])
            for what, (most, formula) in found.items():
                yield Row(f"ZeRO {zero}, {ranks} ranks: {what}", most / MIB, formula / MIB, HELD_BAR)


def held(zero: int) -> None:
    from benchmarks.zero_contenders import PARAMETERS, of_pipeloom

    ranks = int(os.environ["WORLD_SIZE"])
    engine, step = of_pipeloom(ranks, zero=zero)
    for _ in range(2):
        step()
    measured = engine.memory_report().measured
    found = {
        "parameters": (max(rank.parameters for rank in measured), 4 * PARAMETERS / (ranks if zero >= 3 else 1)),
        "gradients": (max(rank.gradients for rank in measured), 4 * PARAMETERS / (ranks if zero >= 2 else 1)),
        "optimizer": (max(rank.optimizer for rank in measured), 8 * PARAMETERS / (ranks if zero >= 1 else 1)),
    }
    if engine.mesh.rank == 0:
        print(json.dumps(found))


def peak_rows() -> Iterator[Row]:
    """Resident memory at most, ours with ZeRO 3 over each peer's."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # large tensors in pages of their own, for all three
    found = {name: run_ranks("benchmarks.zero_memory", 2, ["--what", name], peers=True) for name in PEAKS}
    for peer in PEAKS[1:]:
        if found[peer] is None:
            missing(peer)
            continue
        for what, ours in found["pipeloom"].items():
            yield Row(f"ZeRO 3, 2 ranks, resident {what}, over {peer}", ours / MIB, found[peer][what] / MIB, PEAK_BAR)


PEAKS = ("pipeloom", "FSDP2", "DeepSpeed")


def peak(name: str) -> None:
    from torch import distributed

    from benchmarks.peaks import resident_bytes
    from benchmarks.zero_contenders import Step, of_deepspeed, of_fsdp, of_pipeloom

    distributed.init_process_group("gloo")
    made: list[Step | None] = []

    def make() -> None:
        step = of_pipeloom(2, zero=3)[1] if name == "pipeloom" else of_fsdp(2) if name == "FSDP2" else of_deepspeed(3)
        made.append(step)
        for _ in range(2):
            if step is not None:
                step()

    at_most = resident_bytes(make)
    step = made[0]
    found = None
    if step is not None:
        found = {"at most": float(at_most), "during a step": float(max(resident_bytes(step) for _ in range(3)))}
    distributed.barrier()
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
