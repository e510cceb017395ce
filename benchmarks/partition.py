"""Are measured costs the right thing to cut by? Every cut of 12 unlike layers over 2 ranks, measured; and `split`.

    python -m benchmarks.partition [--json]

Some layers are cheap in parameters and dear in time (convolutions, attention over a long sequence), some the
reverse (an embedding, wide layers on few rows). All 11 cuts, the one chosen by profile and the one that evens out
parameters run in turn in the same processes.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time

from benchmarks.ranks import Row, median, parser_of, report, run_ranks

ROUNDS = 7
SEQUENCE, WIDTH, VOCABULARY, ROWS, MICRO_BATCHES = 192, 64, 20_000, 2, 6


def main() -> int:
    options = parser_of(__doc__).parse_args()
    if options.worker:
        worker()
        return 0
    found = run_ranks("benchmarks.partition", 2, [])
    cuts = {int(cut): seconds for cut, seconds in found["cuts"].items()}
    best = min(cuts, key=cuts.__getitem__)
    if not options.json:
        print("measured step by cut, ms: " + "  ".join(f"{cut}: {1e3 * s:.1f}" for cut, s in sorted(cuts.items())))
        print(f"profile cuts at {found['profile']} and again at {found['again']}, parameters at {found['parameters']}")
    chosen, again = cuts[found["profile"]], cuts[found["again"]]
    rows = [
        Row(f"step cut by profile over the best cut ({best})", chosen, cuts[best], 1.05),
        Row("step cut by profile over that cut by parameters", chosen, cuts[found["parameters"]], 0.85),
        Row("a second profile's step over the first's", again, chosen, 1.03),
        Row("split of 20,000 layers into 256 parts, seconds over 0.05", _time_of_split(), 0.05, 1.0),
    ]
    return report(rows, as_json=options.json, unit="s")


def _time_of_split() -> float:
    from partition import split

    source = random.Random(0)
    weights = [source.random() for _ in range(20_000)]
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        split(weights, 256)
        times.append(time.perf_counter() - started)
    return median(times)


def worker() -> None:
    import torch

    from benchmarks.unlike_layers import build
    from pipeline import initialize
    from pipeline.engine import Engine

    items = [
        (
            torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(i)),
            torch.randn(ROWS, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(i)),
        )
        for i in range(MICRO_BATCHES)
    ]

    def engine_with(partition: str | tuple[int, ...]) -> Engine:
        config = {"schedule": "1f1b", "micro_batches": MICRO_BATCHES, "partition": partition}
        engine = initialize(build(VOCABULARY, WIDTH), config=config, optimizer=torch.optim.SGD)
        engine.train_batch(list(items))
        return engine

    methods = {"profile": "profile", "again": "profile", "parameters": "parameters"}
    chosen = {name: engine_with(method).plan.cuts[1] for name, method in methods.items()}
    engines = {cut: engine_with((cut,)) for cut in range(1, 12)}
    times: dict[int, list[float]] = {cut: [] for cut in engines}
    for _, (cut, engine) in itertools.product(range(ROUNDS), engines.items()):
        engine.mesh.world.barrier()
        started = time.perf_counter()
        engine.train_batch(list(items))
        times[cut].append(time.perf_counter() - started)
    if engine.mesh.rank == 0:
        print(json.dumps({"cuts": {cut: median(seconds) for cut, seconds in times.items()}, **chosen}))


if __name__ == "__main__":
    sys.exit(main())
