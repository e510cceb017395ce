"""The demo of the README, trained with other settings: what its held-out text then takes.

Not a benchmark by itself; it is what others run on ranks.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from benchmarks.ranks import finish, run_ranks


class Learned(NamedTuple):
    """Nats a byte of the held-out text, and what training warned of."""

    loss: float
    warned: list[str]


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
    sys.argv.remove("--worker")
    train(sys.argv[1:])
