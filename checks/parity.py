"""Training through a pipeline against plain PyTorch in one process, for every schedule and shape.

    python -m checks.parity [--quick] [--every-shape] [--schedules NAME ...] [--jobs N] [--json FILE]

A transformer (embedding, attention, LayerNorm, dropout on, uneven last micro-batch), tied and untied, on
gpipe, 1f1b and interleaved-1f1b × ranks {1, 2, 3, 4} × stages a rank {1, 2, 3} × micro-batches {1, 2, 3, 4, 7, 8} that
the schedule declares possible, and on every other schedule × 4 ranks × stages a rank × micro-batches {3, 8}, ranks
being threads; then, tied, 2 and 4 ranks that are processes over gloo, with 1, 3 and 8 micro-batches.
`--every-shape` takes all schedules through all shapes, most of an hour. Each layout

- in float64: the first step's gradients, the losses of 20 steps of SGD with momentum, and the weights after them
  equal plain training to 1e-12 (gradients and weights relative to the largest of their layer);
- in float32: losses, gradient norms and weights of 3 steps, in which weights become multiples of their gradients so
  that no bit of these is lost, are the same bits as in one process, where the schedule promises bits; where it keeps
  two copies of the layers, as in the shortest layout that does.

Ends with code 1 when a layout does not. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.pipeline.layouts import Layout, layouts
from tests.pipeline.models import GradientsAsParameters, Recipe, restless
from tests.pipeline.reference import Case, Outcome, plainly
from tests.pipeline.running import agreed, difference, everywhere, run, same_bits, train_here, transformer_case

TOLERANCE = 1e-12
RANKS, STAGES, MICRO_BATCHES = (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 7, 8)
PROCESSES, PROCESS_MICRO_BATCHES = (2, 4), (1, 3, 8)
STEPS, STEPS_FOR_BITS = 20, 3
EVERY_SHAPE = ("gpipe", "1f1b", "interleaved-1f1b")
OTHERS = {(4, 3), (4, 8)}  # ranks and micro-batches of all other schedules


@dataclass(frozen=True)
class Finding:
    """One layout held against plain training and against one process."""

    layout: Layout
    tied: bool
    link: str
    losses: float
    gradients: float
    weights: float
    bits: bool | None
    """Whether float32 gives the bits of one process, or of the shortest layout with two copies; None where neither is
    promised."""

    @property
    def passed(self) -> bool:
        return max(self.losses, self.gradients, self.weights) <= TOLERANCE and self.bits is not False


class Runs:
    """The cases for one number of micro-batches, with what they come to in plain PyTorch and in one process."""

    def __init__(self, tied: bool, count: int, steps: int) -> None:
        double, single = Recipe(tied=tied, dtype=torch.float64), Recipe(tied=tied)
        self.training = transformer_case(double, count, steps=steps)
        self.first_step = replace(self.training, steps=1, optimizer=GradientsAsParameters)
        self.single = transformer_case(single, count, steps=STEPS_FOR_BITS, optimizer=restless)
        self.tied, alone = tied, Layout(micro_batches=count)
        before = run(replace(self.training, steps=0), alone).before
        self.plain, self.plain_first = (plainly(case, alone, before) for case in (self.training, self.first_step))
        self.alone = run(self.single, alone)
        self.twice: Outcome | None = None  # with two copies of the layers; on first use

    @property
    def cases(self) -> tuple[Case, Case, Case]:
        return self.training, self.first_step, self.single

    def judge(self, layout: Layout, link: str, outcomes: Sequence[Outcome]) -> Finding:
        """The finding on a layout, from what its three cases came to."""
        trained, first, single = outcomes
        return Finding(
            layout,
            self.tied,
            link,
            max(abs(a - b) / abs(b) for a, b in zip(trained.losses, self.plain.losses, strict=True)),
            difference(first.after, self.plain_first.after),
            difference(trained.after, self.plain.after),
            self._same_bits(layout, single),
        )

    def _same_bits(self, layout: Layout, found: Outcome) -> bool | None:
        made = layout.build()
        if not made.ordered:
            return None
        if len(made.routes) == 1:
            return same_bits(found, self.alone)
        self.twice = self.twice or run(self.single, Layout("chimera", 2, 2, layout.micro_batches))
        return same_bits(found, self.twice)


def on_threads(tied: bool, count: int, steps: int, chosen: Sequence[Layout]) -> list[Finding]:
    """The findings on layouts with this number of micro-batches."""
    torch.set_num_threads(1)
    runs = Runs(tied, count, steps)
    return [runs.judge(layout, "threads", [run(case, layout) for case in runs.cases]) for layout in chosen]


def on_processes(ranks: int, steps: int, chosen: Sequence[Layout]) -> list[Finding]:
    """The findings on layouts of this number of ranks: real processes that live through all of them."""
    torch.set_num_threads(1)
    runs = {count: Runs(True, count, steps) for count in sorted({layout.micro_batches for layout in chosen})}
    todo = [(layout, runs[layout.micro_batches].cases) for layout in chosen]
    by_rank = everywhere(_train_all, ranks, todo, processes=True, timeout=1800.0)
    return [
        runs[layout.micro_batches].judge(
            layout, "gloo", [agreed(results, layout) for results in zip(*of_layout, strict=True)]
        )
        for layout, *of_layout in zip(chosen, *by_rank, strict=True)
    ]


def _train_all(todo: Sequence[tuple[Layout, Sequence[Case]]]) -> list[list[tuple[Outcome, bool]]]:
    return [[train_here(case, layout) for case in cases] for layout, cases in todo]


# -- the whole -----------------------------------------------------------------------------------------------

Job = tuple[Callable[..., list[Finding]], tuple[Any, ...]]


Wanted = Callable[[Layout], bool]


def wanted(every_shape: bool, schedules: Sequence[str]) -> Wanted:
    """Which layouts of the grid are to be trained."""

    def want(layout: Layout) -> bool:
        if schedules and layout.schedule not in schedules:
            return False
        return every_shape or layout.schedule in EVERY_SHAPE or (layout.ranks, layout.micro_batches) in OTHERS

    return want


def thread_jobs(quick: bool, want: Wanted) -> Iterator[Job]:
    """The longest first, so that the cores end together."""
    for count in sorted((3, 4) if quick else MICRO_BATCHES, reverse=True):
        grid = layouts((1, 2, 4) if quick else RANKS, (1, 2) if quick else STAGES, (count,))
        chosen = list(filter(want, grid))
        for tied in (True, False):
            yield on_threads, (tied, count, 5 if quick else STEPS, chosen)


def process_jobs(quick: bool, want: Wanted) -> Iterator[Job]:
    for ranks in PROCESSES:
        grid = layouts((ranks,), (1, 2) if quick else STAGES, (3,) if quick else PROCESS_MICRO_BATCHES)
        yield on_processes, (ranks, 5 if quick else STEPS, list(filter(want, grid)))


def results(jobs: Iterable[Job], workers: int) -> Iterator[list[Finding] | str]:
    """The findings of each job as it ends, or the traceback of one that failed."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(function, *arguments) for function, arguments in jobs]):
            error = done.exception()
            yield done.result() if error is None else "".join(traceback.format_exception(error))


@contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)


def show(findings: Sequence[Finding]) -> None:
    """A line for each schedule, ranks, stages a rank, link and model: the worst over the numbers of micro-batches."""
    print(f"\n{'':54}micro-batches   largest difference in float64             float32")
    print(f"{'schedule':20}{'ranks':>6}{'stages':>8}  link     model    {'':17}losses    gradients  weights     bits")
    ordered = sorted(findings, key=lambda f: (*_group(f), f.layout.micro_batches))
    for (link, name, ranks, stages, untied), group in groupby(ordered, key=_group):
        members = list(group)
        counts = " ".join(str(f.layout.micro_batches) for f in members)
        columns = zip(*((f.losses, f.gradients, f.weights) for f in members), strict=True)
        worst = "  ".join(f"{max(column):9.1e}" for column in columns)
        bits = {f.bits for f in members}
        same = "DIFFER" if False in bits else "same" if True in bits else "not promised"
        mark = "" if all(f.passed for f in members) else "   FAILED"
        model = "untied" if untied else "tied"
        print(f"{name:20}{ranks:6}{stages:8}  {link:8} {model:8} {counts:15} {worst}   {same}{mark}")


def _group(finding: Finding) -> tuple[str, str, int, int, bool]:
    layout = finding.layout
    return finding.link, layout.schedule, layout.ranks, layout.stages_per_rank, not finding.tied


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and 5 steps")
    parser.add_argument("--every-shape", action="store_true", help="all schedules through all shapes")
    parser.add_argument("--schedules", nargs="+", default=(), metavar="NAME", help="these schedules alone")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at work at a time")
    parser.add_argument("--json", type=Path, help="also write every finding into this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    findings: list[Finding] = []
    errors = 0
    want = wanted(options.every_shape, options.schedules)
    for what, jobs, workers in (
        ("ranks as threads", thread_jobs(options.quick, want), options.jobs),
        ("ranks as processes over gloo", process_jobs(options.quick, want), 1),  # each starts its ranks
    ):
        with timed(what):
            for result in results(jobs, workers):
                if isinstance(result, str):
                    errors += 1
                    print(result, file=sys.stderr)
                else:
                    findings += result
    show(findings)
    failed = [f for f in findings if not f.passed]
    for finding in failed:
        print(f"FAILED: {finding}")
    if options.json:
        options.json.write_text(json.dumps([{**asdict(f), "passed": f.passed} for f in findings], indent=1))
    print(f"\n{len(findings)} layouts, {len(failed)} failed; {errors} jobs ended with an error")
    return 1 if failed or errors else 0


if __name__ == "__main__":
    sys.exit(main())
