"""The demo of the README, trained with other settings: what its held-out text takes then, and what it warns of.

    python -m benchmarks.demo [--json]

`bf16`: nats a byte after 300 steps with all layers in bf16, norms in fp32, over those in fp32, which may be 0.02 nats
away.  `healthy`: warnings in 500 steps, plus 1.  Other benchmarks train it here with settings of their own.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from benchmarks.ranks import Row, finish, parser_of, report, run_ranks

NATS = 0.02
STEPS, HEALTHY_STEPS = 300, 500
BF16 = "--precision=*=bf16,*Norm*=fp32"


class Learned(NamedTuple):
    """Nats a byte of the held-out text, and what training warned of."""

    loss: float
    warned: list[str]


def main() -> int:
    options = parser_of(__doc__).parse_args()
    fp32, bf16 = (learned(2, *flags, steps=STEPS).loss for flags in ((), (BF16,)))
    rows = [Row(f"bf16 over fp32, {STEPS} steps", max(fp32, bf16), min(fp32, bf16), 1 + NATS / min(fp32, bf16))]
    warned = learned(2, steps=HEALTHY_STEPS).warned
    for text in warned:
        print(text, file=sys.stderr)
    rows.append(Row(f"warnings in {HEALTHY_STEPS} healthy steps, plus 1", 1.0 + len(warned), 1.0, 1.0))
    return report(rows, as_json=options.json, unit="")


def learned(ranks: int, *flags: str, steps: int) -> Learned:
    """Train on so many ranks; ``flags`` are those of train_gpt.py."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--steps={steps}", f"--output={folder}", *flags)
        return Learned(*run_ranks("benchmarks.demo", ranks, flags, timeout=1200.0))


def train(arguments: list[str]) -> None:
    """On each rank: train, and find the loss."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import corpus
    import train_gpt

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        options = train_gpt.options_parser().parse_args(arguments)
        text = corpus.load(options.data)
        engine = train_gpt.make_engine(options)
        mesh = engine.mesh
        while engine.steps < options.steps:
            seed = engine.steps * mesh.data + mesh.data_rank
            engine.train_batch(corpus.random_windows(text.train, options.seq, options.rows, seed))
        loss = train_gpt.evaluate(engine, text.held_out, options.seq)
    finish([loss, [str(warning.message) for warning in warned]])


if __name__ == "__main__":
    if "--worker" in sys.argv:
        sys.argv.remove("--worker")
        train(sys.argv[1:])
    else:
        sys.exit(main())
