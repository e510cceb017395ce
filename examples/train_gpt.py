"""Train a small GPT on English text, byte by byte, through a pipeline.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py                                    # the same model in one process

Ctrl-C ends training after the step it is in, writes a checkpoint and exits with code 0; torchrun then reports
the signal with a code and a traceback of its own.  The same command with --resume goes on from there, in as
many processes as you like, to the same bits as if it had never stopped.
"""

from __future__ import annotations

import argparse
import math
import signal
from pathlib import Path

import corpus
import torch
from gpt import GPT
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from pipeline import PipelineConfig, initialize
from pipeline.engine import Engine
from pipeline.progress import beside, live
from schedules import Timeline

DEFAULTS = {"schedule": "interleaved-1f1b", "micro_batches": 8, "gradient_clipping": 1.0}
MEASURED = 9  # steps at the end of training, of which the median is compared with the prediction


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT through a pipeline.")
    add = parser.add_argument_group("this example").add_argument
    add("--layers", type=int, default=4, help="blocks of attention and MLP (default 4)")
    add("--dim", type=int, default=128, help="width (default 128)")
    add("--heads", type=int, default=4, help="attention heads (default 4)")
    add("--seq", type=int, default=128, help="bytes in a window (default 128)")
    add("--rows", type=int, default=2, help="windows in a micro-batch (default 2)")
    add("--steps", type=int, default=400, help="training steps (default 400)")
    add("--lr", type=float, default=4e-3, help="highest learning rate (default 0.004)")
    add("--data", type=Path, help="a text to learn, instead of Python's documentation")
    add("--output", type=Path, default=Path("runs/gpt"), help="for checkpoints and bubbles.html (runs/gpt)")
    add("--sample", type=int, default=300, help="bytes to write at the end (default 300)")
    PipelineConfig.add_arguments(parser)
    return parser


def make_engine(options: argparse.Namespace) -> Engine:
    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / options.steps)))

    return initialize(
        GPT(options.layers, options.dim, options.heads),
        config=PipelineConfig.load({**DEFAULTS, "save_to": options.output}, options),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95)),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        param_groups=lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0},
    )


def evaluate(engine: Engine, text: Tensor, seq: int) -> float:
    """The mean over all of the held-out text."""
    items, limit = corpus.all_windows(text, seq, rows=8), engine.config.micro_batches
    total = 0.0
    for first in range(0, len(items), limit):
        step = items[first : first + limit]
        total += float(engine.eval_batch(step)) * sum(len(inputs) for inputs, _ in step)
    return total / sum(len(inputs) for inputs, _ in items)


def sample(engine: Engine, prompt: bytes, length: int, seq: int) -> str:
    """Continue ``prompt``, byte by byte.

    The last stage's rank has the outputs.  It chooses a byte and shares it, for the first rank to feed back.
    """
    text, generator = list(prompt), torch.Generator().manual_seed(0)
    for _ in range(length):
        context = text[-seq:]
        padded = F.pad(torch.tensor([context]), (0, seq - len(context)))  # attention never looks ahead
        outputs, choice = engine.forward([(padded, None)]), None
        if outputs is not None:
            chances = (outputs[0][0, len(context) - 1] / 0.7).softmax(-1)
            choice = torch.multinomial(chances.cpu(), 1, generator=generator).item()
        text.append(engine.share(choice))
    return bytes(text).decode(errors="replace")


def train(engine: Engine, text: Tensor, options: argparse.Namespace) -> list[Timeline]:
    """Train to the last step, or to the end of the one in which a signal comes; return the last timelines."""
    signal.signal(signal.SIGINT, lambda *_: engine.request_stop())
    mesh, timelines = engine.mesh, []
    amount = mesh.data * engine.config.micro_batches * options.rows * options.seq
    with live(engine, options.steps, unit="tokens", amount=amount) as report:
        while engine.steps < options.steps and not engine.should_stop:
            seed = engine.steps * mesh.data + mesh.data_rank  # the step's number is the place in the data
            report(engine.train_batch(corpus.random_windows(text, options.seq, options.rows, seed)))
            if engine.steps > options.steps - MEASURED:
                timelines.append(engine.timeline())
    return timelines


def main() -> None:
    parser = options_parser()
    options = parser.parse_args()
    text = corpus.load(options.data)
    try:
        engine = make_engine(options)
    except ValueError as error:  # every setting that cannot be run ends here
        parser.exit(2, f"{parser.prog}: {error}\n")
    console = Console(quiet=engine.mesh.rank != 0, highlight=False, soft_wrap=True)
    timelines = train(engine, text.train, options)
    if engine.should_stop:
        console.print(f"stopped after step {engine.steps}, wrote {engine.finish_saving()}; go on with --resume")
        return
    engine.save_checkpoint()
    console.print(f"eval loss: {evaluate(engine, text.held_out, options.seq):.3f} nats/byte")
    console.print(sample(engine, b"The ", options.sample, options.seq), markup=False)
    if timelines:
        measured = sorted(timelines, key=lambda timeline: timeline.step_time)[len(timelines) // 2]
        predicted, page = engine.predicted_timeline(), options.output / "bubbles.html"
        if engine.mesh.rank == 0:
            measured.save(page, over=predicted)
        console.print(beside(predicted, measured), predicted.difference(measured).text())
        console.print(f"every bubble with its cause: {page}")


if __name__ == "__main__":
    main()
