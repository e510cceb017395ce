"""From layout to layout: do training and its state go on as if nothing had changed?

    python -m benchmarks.relayout [--pairs 12] [--json]

Random pairs of layouts: 1 to 4 ranks, 1 to 3 stages a rank, 1 or 2 copies of the pipeline, ZeRO 0 to 3, in fp64 with
AdamW.  Two steps in the first, then two in the second, which is loaded from a checkpoint by other ranks, or, where the
number of ranks is the same, taken on while training runs.  Numbers are the largest difference, of losses and weights,
from a run that stays in the first layout: 0 where both have the same copies and the same ZeRO stage, since sums are
taken in the same order then, else rounding.  The bytes that went from rank to rank are told beside those of the state.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ranks import Row, parser_of, report

ROUNDING = 1e-11


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for seed in range(options.pairs):
        rows += pair(seed)
    return report(rows, as_json=options.json, unit="")


def pair(seed: int) -> list[Row]:
    from pipeline import run_local

    draw = random.Random(seed)
    ranks, first = drawn(draw, None)
    others, second = drawn(draw, None if seed % 2 else ranks)
    same = all(first[name] == second[name] for name in ("data_parallel", "zero"))
    stayed = run_local(stay, ranks, first)[0]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        run_local(save, ranks, first, directory)
        loaded = run_local(load, others, second, directory)[0]
        ways = {"loaded": loaded}
    if ranks == others:
        ways["live"] = run_local(change, ranks, first, second)[0]
    for way, found in ways.items():
        name = f"{way}: {told(ranks, first)} to {told(others, second)}"
        rows.append(Row(name, difference(found, stayed), 1.0, 0.0 if same else ROUNDING))
    return rows


def drawn(draw: random.Random, ranks: int | None) -> tuple[int, dict[str, Any]]:
    ranks = ranks or draw.choice((1, 2, 3, 4, 4, 4))
    data = draw.choice((1, 2, 2)) if ranks % 2 == 0 else 1
    stages = draw.choice((1, 2, 3))
    schedule = draw.choice(("1f1b", "gpipe", "zb-h1")) if stages == 1 else "interleaved-1f1b"
    return ranks, {
        "schedule": schedule,
        "stages_per_rank": stages,
        "data_parallel": data,
        "zero": draw.choice((0, 1, 2, 3)) if data > 1 else 0,
        "micro_batches": 4 // data,
    }


def told(ranks: int, layout: dict[str, Any]) -> str:
    words = f"{layout['schedule']}:{layout['stages_per_rank']} on {layout['data_parallel']} x "
    return f"{words}{ranks // layout['data_parallel']}, ZeRO {layout['zero']}"


def engine_of(layout: dict[str, Any]) -> Any:
    import torch

    from pipeline import initialize
    from tests.pipeline.models import Recipe, adamw, transformer

    settings = {**layout, "partition": "uniform", "device": "cpu"}
    return initialize(transformer(Recipe(dtype=torch.float64)), config=settings, optimizer=adamw)


def steps(engine: Any, count: int) -> list[float]:
    from tests.pipeline.models import micro_batches

    losses = []
    for _ in range(count):
        each = 4 // engine.mesh.data
        own = micro_batches(4, engine.steps)[engine.mesh.data_rank * each : (engine.mesh.data_rank + 1) * each]
        losses.append(engine.train_batch(own).item())
    return losses


def stay(layout: dict[str, Any]) -> Any:
    engine = engine_of(layout)
    return steps(engine, 4)[2:], engine.full_state_dict()


def save(layout: dict[str, Any], directory: str) -> None:
    engine = engine_of(layout)
    steps(engine, 2)
    engine.save_checkpoint(Path(directory))


def load(layout: dict[str, Any], directory: str) -> Any:
    engine = engine_of(layout)
    engine.load_checkpoint(Path(directory))
    return steps(engine, 2), engine.full_state_dict()


def change(layout: dict[str, Any], other: dict[str, Any]) -> Any:
    engine = engine_of(layout)
    steps(engine, 2)
    engine.relayout(**other)
    return steps(engine, 2), engine.full_state_dict()


def difference(found: Any, expected: Any) -> float:
    losses = max(abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True))
    largest = {name: max(1.0, float(tensor.abs().max())) for name, tensor in expected[1].items()}
    weights = max(float((found[1][name] - t).abs().max()) / largest[name] for name, t in expected[1].items())
    return max(losses, weights)


if __name__ == "__main__":
    sys.exit(main())
