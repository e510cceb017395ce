"""What a message costs between two processes of a host, through memory that they share and through gloo's sockets.

    python -m benchmarks.link [--json]

Half of a round trip, the two links by turns; back to back, and after pauses as long as a stage computes, when both
processes have been asleep and their caches are cold.
"""

from __future__ import annotations

import json
import sys

from benchmarks.ranks import Row, median, parser_of, report, run_ranks

SIZES = (128, 16 << 10, 128 << 10, 512 << 10)
PAUSES = (0.0, 0.010)
ROUNDS = 40
TURNS = 5
BAR = 0.75  # above this the second way would not be worth its code


def main() -> int:
    options = parser_of(__doc__).parse_args()
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
    from pipeline.profiler import round_trip

    mesh = make_mesh(device="cpu", link="shm")
    mesh.link.connect([(0, 1), (1, 0)])
    assert isinstance(mesh.link, SharedLink)
    begins = mesh.rank == 0
    found: dict[str, tuple[list[float], list[float]]] = {}
    for size in SIZES:
        ball = torch.zeros(size, dtype=torch.uint8)
        for pause in PAUSES:
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(TURNS):
                for link, into in zip((mesh.link, mesh.link.tagged), times, strict=True):
                    mesh.world.barrier()
                    trips = [round_trip(link, 1 - mesh.rank, ball, begins=begins, pause=pause) for _ in range(ROUNDS)]
                    into.append(median(trips) / 2)
            found[f"{size} bytes, {'back to back' if not pause else f'after {pause * 1000:.0f} ms'}"] = times
    if begins:
        print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
