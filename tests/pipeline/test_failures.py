"""What is left of a step that fails, and of ranks when one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import StateError, StepFailed
from tests.pipeline.blocks import SIZES, WIDTH, Block, blocks, items, start
from tests.pipeline.models import sgd
from tests.pipeline.processes import run_processes, try_processes
from tests.pipeline.reference import Case, Layout, Outcome

pytestmark = pytest.mark.usefixtures("double_precision")

# -- failures ------------------------------------------------------------------------------------------------

BAD = 99.0


class Refusal(torch.autograd.Function):
    """Raises in its backward where the mark is bad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Tensor) -> Tensor:
        ctx.bad = bool((mark == BAD).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.bad:
            raise ValueError("bad data")
        return gradient, None


class Fragile(nn.Module):
    """Raises where the second of a pair, which is handed on by all layers, is bad; and counts in a buffer."""

    def __init__(self, when: str = "never") -> None:
        super().__init__()
        self.when = when
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mark = pair
        self.seen += len(x)
        if self.when == "forward" and bool((mark == BAD).any()):
            raise ValueError("bad data")
        y = x + self.linear(self.norm(x)).tanh()
        return Refusal.apply(y, mark) if self.when == "backward" else y, mark


def fragile(place: int, when: str) -> Case:
    """Six layers, one of which, or the loss, fails at micro-batch 3 of each step whose number is odd."""

    def loss(pair: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        if when == "loss" and bool((pair[1] == BAD).any()):
            raise ValueError("bad data")
        return functional.mse_loss(pair[0], targets)

    def marked(step: int, rank: int) -> list[Item]:
        made = items(step // 2, rank, (2, 3, 2, 2, 2))
        bad = step % 2 == 1 and rank == 0
        marks = [torch.full((1,), BAD if bad and number == 3 else 0.0) for number in range(5)]
        return [Item((x, mark), y) for (x, y), mark in zip(made, marks, strict=True)]

    layers = [LayerSpec(Fragile, when if index == place else "never") for index in range(6)]
    return Case(lambda: PipelineModule(layers, loss), marked)


FAILURES = [
    (0, "forward", Layout("1f1b", 3, 1, 5)),
    (2, "forward", Layout("1f1b", 3, 1, 5)),
    (5, "forward", Layout("gpipe", 3, 1, 5)),
    (5, "forward", Layout("split", 6, 1, 5)),
    (3, "forward", Layout("vee", 2, 2, 5)),
    (3, "forward", Layout("interleaved-1f1b", 2, 2, 5, recompute="every")),
    (2, "forward", Layout("1f1b", 1, 1, 5)),
    (0, "backward", Layout("1f1b", 3, 1, 5)),
    (3, "backward", Layout("split", 3, 1, 5)),
    (5, "backward", Layout("gpipe", 6, 1, 5)),
    (2, "backward", Layout("1f1b", 2, 1, 5, recompute="every")),
    (6, "loss", Layout("1f1b", 3, 1, 5)),
    (6, "loss", Layout("split", 1, 1, 5)),
    (2, "forward", Layout("1f1b", 6, 1, 5, data_parallel=2)),
]


def train_with_failures(place: int, when: str, layout: Layout, fail: bool) -> tuple[Outcome, tuple[Any, ...]]:
    """Three steps, the first and the last of them after one that fails, and what was raised then."""
    torch.set_default_dtype(torch.float64)
    case = fragile(place, when)
    engine = start(case.model, layout)
    before, losses, norms, raised = engine.full_state_dict(), [], [], []
    for step in range(3):
        if fail and step != 1:
            with pytest.raises(StepFailed) as caught:
                engine.train_batch(case.items(2 * step + 1, engine.mesh.data_rank))
            raised.append((caught.value.rank, caught.value.layer, caught.value.action, str(caught.value)))
        losses.append(engine.train_batch(case.items(2 * step, engine.mesh.data_rank)).item())
        norms.append(engine.stats.gradient_norm if engine.stats else 0.0)
    return Outcome(before, tuple(losses), tuple(norms), (), engine.full_state_dict()), tuple(raised)


@pytest.mark.parametrize(("place", "when", "layout"), FAILURES, ids=str)
def test_nothing_is_left_of_a_step_that_failed(place: int, when: str, layout: Layout) -> None:
    """Every rank is told where and why; the next step is as if there had been none: weights, buffers, numbers drawn.

    The first step fails, before the forms of messages have been agreed on, and a later one.
    """
    clean = run_local(train_with_failures, layout.ranks, place, when, layout, False)
    broken = run_local(train_with_failures, layout.ranks, place, when, layout, True)
    compare(clean, broken, place, when)


def test_nothing_is_left_of_a_step_that_failed_between_processes() -> None:
    layout = Layout("1f1b", 3, 1, 5)
    clean = run_local(train_with_failures, 3, 2, "forward", layout, False)
    compare(clean, run_processes(train_with_failures, 3, 2, "forward", layout, True), 2, "forward")


def compare(clean: list[Any], broken: list[Any], place: int, when: str) -> None:
    """The same bits with and without failures, and all ranks were told the same."""
    told = broken[0][1]
    for (mine, _), (theirs, raised) in zip(clean, broken, strict=True):
        assert (theirs.losses, theirs.norms) == (mine.losses, mine.norms)
        assert all(theirs.after[name].equal(tensor) for name, tensor in mine.after.items())
        assert raised == told
    for rank, layer, action, text in told:
        assert layer == ("loss" if when == "loss" else f"{place} (Fragile)")
        assert action.endswith(("B3", "I3") if when == "backward" else "F3")
        assert text == f"rank {rank} failed in {action} in layer {layer}: ValueError: bad data"


def test_the_layer_that_failed_is_named_and_its_error_is_shown_first(capsys: pytest.CaptureFixture[str]) -> None:
    case, layout = fragile(2, "forward"), Layout("1f1b", 3, 1, 5)

    def worker() -> StepFailed:
        with pytest.raises(StepFailed) as caught:
            start(case.model, layout).train_batch(case.items(1, 0))
        return caught.value

    errors = run_local(worker, 3)
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1
    assert printed.rstrip().endswith("ValueError: bad data\nraised on rank 1 in 1F3 in layer 2 (Fragile)")
    assert [str(error) for error in errors] == ["rank 1 failed in 1F3 in layer 2 (Fragile): ValueError: bad data"] * 3
    assert [type(error.__cause__) for error in errors] == [type(None), ValueError, type(None)]


def test_an_evaluation_that_failed() -> None:
    case, layout = fragile(4, "forward"), Layout("1f1b", 3, 1, 5)

    def worker() -> bool:
        engine = start(case.model, layout)
        expected = engine.eval_batch(case.items(0, 0))
        for evaluate in (engine.eval_batch, engine.forward):
            with pytest.raises(StepFailed, match="rank 2 failed in 2F3 in layer 4"):
                evaluate(case.items(1, 0))
        return engine.eval_batch(case.items(0, 0)).equal(expected)

    assert run_local(worker, 3) == [True] * 3


class Stumbling:
    """An update, of weights or of the learning rate, that fails at the second step of some ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.calls = ranks, 0

    def step(self, rank: int) -> None:
        self.calls += 1
        if self.calls == 2 and rank in self.ranks:
            raise RuntimeError("no update")


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_of_an_update_that_failed(ranks: int) -> None:
    """Where it raised on every rank, training goes on as if the step had not been."""

    def worker(fail: bool) -> tuple[list[float], dict[str, Tensor]]:
        failing = Stumbling(range(ranks) if fail else ())

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                failing.step(engine.mesh.rank)
                super().step()

        module, settings = blocks(), Layout("1f1b", ranks).settings()
        engine = initialize(module, config=settings, optimizer=lambda groups: Optimizer(groups, lr=0.1))
        losses = [engine.train_batch(items(0, 0)).item()]
        if fail:
            with pytest.raises(RuntimeError, match="no update"):
                engine.train_batch(items(1, 0))
        losses += [engine.train_batch(items(step, 0)).item() for step in (2, 3)]
        return losses, engine.full_state_dict()

    (clean, before), (broken, after) = run_local(worker, ranks, False)[0], run_local(worker, ranks, True)[0]
    assert broken == clean
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_update_that_failed_on_one_rank_is_told_on_all(ranks: int, tmp_path: Path) -> None:
    """Weights of different steps never train together; a checkpoint brings the ranks together again."""

    def worker() -> tuple[str, float]:
        failing = Stumbling([1])

        class Scheduler:
            def __init__(self, optimizer: Any) -> None: ...

            def step(self) -> None:
                failing.step(engine.mesh.rank)

            def state_dict(self) -> dict[str, Any]:
                return {}

            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        module, settings = blocks(), Layout("1f1b", ranks, data_parallel=ranks // 2).settings()
        engine = initialize(module, config=settings, optimizer=sgd, lr_scheduler=Scheduler)
        engine.train_batch(items(0, 0))
        engine.save_checkpoint(tmp_path / str(ranks))
        if engine.mesh.rank == 1:
            with pytest.raises(RuntimeError, match="no update"):
                engine.train_batch(items(1, 0))
        else:
            engine.train_batch(items(1, 0))
        with pytest.raises(StateError) as caught:
            engine.train_batch(items(1, 0))
        engine.load_checkpoint(tmp_path / str(ranks))
        return str(caught.value), engine.train_batch(items(1, 0)).item()

    results = run_local(worker, ranks)
    assert len(set(results)) == 1
    assert "rank 0 has made 2; rank 1 has made 1" in results[0][0]


# -- the end of one rank -------------------------------------------------------------------------------------


class Doomed(nn.Module):
    """Brings its process to an end at the third micro-batch of the second step, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "while it is built":
            fail(how)
        self.how = how
        self.calls = 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == len(SIZES) + 3:
            fail(self.how)
        return self.linear(x)


def fail(how: str) -> None:
    print(f"failing at {time.monotonic()}", flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "exits":
        raise SystemExit(3)
    raise ValueError(f"doomed {how}")


class DoomedOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        fail("in the optimizer")


def doomed_training(how: str) -> None:
    """Three ranks, of which one fails; nobody catches anything."""
    torch.set_default_dtype(torch.float64)
    rank = int(os.environ["RANK"])
    doomed = how if how in ("in a layer", "while it is built", "killed", "interrupted", "exits") else "never"
    layers = [LayerSpec(Block), LayerSpec(Doomed, doomed) if doomed != "never" else LayerSpec(Block), LayerSpec(Block)]
    optimizer = DoomedOptimizer if how == "in the optimizer" and rank == 1 else torch.optim.SGD
    module = PipelineModule(layers, functional.mse_loss)
    engine = initialize(module, config=Layout("1f1b", 3).settings(timeout=300.0), optimizer=optimizer)
    for step in range(3):
        data = iter(items(step, 0, (2, 3, 2, 2)))
        if how == "in its data" and rank == 0 and step == 1:
            data = (fail(how) for _ in range(1))
        engine.train_batch(data)
        if how == "between steps" and rank == 1:
            fail(how)


ENDS = {
    "in a layer": "ValueError: doomed in a layer\nraised on rank 1 in 1F2 in layer 1 (Doomed)",
    "while it is built": "ValueError: doomed while it is built",
    "in the optimizer": "ValueError: doomed in the optimizer",
    "in its data": "ValueError: doomed in its data",
    "between steps": "ValueError: doomed between steps",
    "killed": "",
    "interrupted": "KeyboardInterrupt",
    "exits": "SystemExit: 3",
}


@pytest.mark.parametrize("how", ENDS)
def test_all_processes_end_soon_after_one(how: str) -> None:
    """Within 10 seconds, though a wait may take 300; the rank that failed tells why, the others that it did."""
    endings = try_processes(doomed_training, 3, how, timeout=60.0)
    ended = time.monotonic()
    culprit = endings[0 if how == "in its data" else 1]
    story = culprit.output + (culprit.error or "")
    assert ended - float(story.split("failing at ")[1].split()[0]) < 10.0
    assert ENDS[how] in story
    for ending in endings:
        assert ending.exit_code == (-signal.SIGKILL if how == "killed" and ending is culprit else 1)
        if ending is not culprit:
            assert (
                "StepFailed: rank 1 failed in 1F2 in layer 1 (Doomed): ValueError: doomed in a layer" in ending.error
            ) == (how == "in a layer")
            assert how == "in a layer" or "DataError" in ending.error or "RankDied" in ending.error
    if how == "killed":
        assert any("rank 1 has died; it last told that it is in 1F2" in (ending.error or "") for ending in endings)


def dawdle() -> None:
    """Rank 1 comes to no second step, while the others wait for it."""
    torch.set_default_dtype(torch.float64)
    module, settings = blocks(), Layout("1f1b", 3).settings(timeout=2.0)
    engine = initialize(module, config=settings, optimizer=sgd)
    engine.train_batch(items(0, 0))
    if engine.mesh.rank == 1:
        time.sleep(8.0)
    engine.train_batch(items(1, 0))


def test_a_rank_that_never_comes_is_named() -> None:
    outer = try_processes(dawdle, 3, timeout=60.0)[::2]
    errors = [ending.error or "" for ending in outer]
    assert any("TransferTimeout" in error for error in errors)
    assert all("TransferTimeout" in error or "RankDied" in error for error in errors)  # of the one that gave up first
    told = "waits in the agreement that opens the step for rank 1, which is outside of any step since"
    assert any(told in error for error in errors)


SCRIPT = """
import time
import torch
from tests.pipeline.test_failures import doomed_training
doomed_training("in a layer")
"""


def test_torchrun_shows_the_error_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    ended = time.monotonic()
    assert done.returncode != 0
    assert ended - float(done.stdout.split("failing at ")[1].split()[0]) < 10.0
    first = done.stderr[done.stderr.index("Traceback") :]
    assert ENDS["in a layer"] in first.partition("StepFailed")[0]
