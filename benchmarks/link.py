"""What a message costs between two processes of a host, through memory that they share and through gloo's sockets.

    python -m benchmarks.link [--json]

Half of a round trip, the two links by turns; back to back, and after pauses as long as a stage computes, when both
processes have been asleep and their caches are cold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.ranks import Row, median, report, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.links.protocol import Link

SIZES = (128, 16 << 10, 128 << 10, 512 << 10)
PAUSES = (0.0, 0.010)
ROUNDS = 40
TURNS = 5
BAR = 0.75  # above this the second way would not be worth its code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    found = run_ranks("benchmarks.link", 2, [])
    rows = [Row(name, 1e6 * median(shm), 1e6 * median(gloo), BAR) for name, (shm, gloo) in found.items()]
    return report(rows, as_json=options.json, unit="us")


def worker() -> None:
    import torch

    from pipeline.links.shared_link import SharedLink
    from pipeline.mesh import make_mesh

    mesh = make_mesh(device="cpu", link="shm")
    mesh.link.connect([(0, 1), (1, 0)])
    assert isinstance(mesh.link, SharedLink)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for size in SIZES:
        ball = torch.zeros(size, dtype=torch.uint8)
        for pause in PAUSES:
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(TURNS):
                for link, into in zip((mesh.link, mesh.link.tagged), times, strict=True):
                    mesh.world.barrier()
                    into.append(median([round_trip(link, ball, pause) for _ in range(ROUNDS)]) / 2)
            found[f"{size} bytes, {'back to back' if not pause else f'after {pause * 1000:.0f} ms'}"] = times
    if mesh.rank == 0:
        print(json.dumps(found))


def round_trip(link: Link, ball: Tensor, pause: float) -> float:
    from pipeline.links.protocol import LANE_F

    if link.rank == 0:
        time.sleep(pause)
        started = time.perf_counter()
        link.send(1, ball, LANE_F).wait()
        link.receive(1, ball, LANE_F).wait()
        return time.perf_counter() - started
    link.receive(0, ball, LANE_F).wait()
    link.send(0, ball, LANE_F).wait()
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
