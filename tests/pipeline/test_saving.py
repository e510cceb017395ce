"""Checkpoints that are written while training runs, when they are due, and whatever happens meanwhile."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.engine import Engine
from pipeline.errors import CheckpointError, ConfigError, TrainingStopped, TrainingWarning
from pipeline.saving import folder
from pipeline.saving.due import Due, best_interval
from pipeline.saving.manifest import MANIFEST
from tests.pipeline.running import everywhere

WIDTH = 64


def items(step: int, rank: int) -> list[Item]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [Item(*torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(4)]


def start(**settings: Any) -> Engine:
    module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH)] * 4, functional.mse_loss)
    config = {"partition": "uniform", "micro_batches": 4, "device": "cpu", **settings}
    return initialize(module, config=config, optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-4))


def train(engine: Engine, until: int) -> list[float]:
    here = engine.mesh.data_rank
    return [float(engine.train_batch(items(engine.steps, here))) for _ in range(engine.steps, until)]


def there(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


# -- beside training -----------------------------------------------------------------------------------------


def save_beside(path: str, settings: dict[str, Any]) -> list[float]:
    """Losses after the second step, behind which a checkpoint is being written."""
    engine = start(**settings)
    train(engine, 2)
    assert engine.save_checkpoint(path, wait=False) == Path(path) / "step-00000002"
    losses = train(engine, 6)
    assert engine.finish_saving() == Path(path) / "step-00000002"
    assert engine._keeper.saver.staged > 0
    return losses


def go_on(path: str, settings: dict[str, Any]) -> list[float]:
    engine = start(**settings)
    engine.load_checkpoint(path)
    return train(engine, 6)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_written_is_the_step_it_was_asked_in(processes: bool, zero: int, tmp_path: Path) -> None:
    """Though the next steps change all of it while it is written."""
    settings = {"data_parallel": 2, "zero": zero}
    losses = everywhere(save_beside, 4, str(tmp_path), settings, processes=processes)
    assert everywhere(go_on, 4, str(tmp_path), settings, processes=processes) == losses
    assert there(tmp_path) == ["latest", "step-00000002"]


def test_the_next_one_waits_for_the_last(tmp_path: Path) -> None:
    engine = start()
    for step in range(1, 5):
        train(engine, step)
        engine.save_checkpoint(tmp_path, wait=False)
    engine.finish_saving()
    assert there(tmp_path) == ["latest", *(f"step-0000000{step}" for step in range(1, 5))]


def test_nothing_has_been_saved_yet() -> None:
    with pytest.raises(CheckpointError, match="no checkpoint has been saved yet"):
        start().finish_saving()


# -- when they are due ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [False, True])
def test_every_so_many_steps_and_only_the_newest_are_left(processes: bool, tmp_path: Path) -> None:
    everywhere(save_every_second, 2, str(tmp_path), processes=processes)
    assert there(tmp_path) == ["latest", "step-00000004", "step-00000006"]


def save_every_second(path: str) -> None:
    engine = start(save_to=path, save_every="2 steps", save_keep=2)
    train(engine, 7)
    engine.finish_saving()


def test_by_time_and_by_steps() -> None:
    now = 0.0
    steps, minutes = Due("3 steps", 1.0, lambda: now), Due("2 minutes", 1.0, lambda: now)
    assert [steps.after(n) for n in range(1, 7)] == [False, False, True, False, False, True]
    assert not minutes.after(1)
    now = 120.0
    assert minutes.after(2)
    minutes.saved(1.0, 1.0)
    assert not minutes.after(3)
    now = 240.0
    assert minutes.after(4)
    assert not Due("never", 1.0, lambda: now).after(1)


def test_auto_is_as_often_as_pays() -> None:
    """Young: the square root of twice the stall times the time between failures, and not before the last is written."""
    now = 0.0
    due = Due("auto", 2.0, lambda: now)
    assert due.after(1), "the first measures what it costs"
    due.saved(0.25, 1.0)
    assert due.interval == best_interval(0.25, 7200.0) == pytest.approx(60.0)
    now = 59.0
    assert not due.after(2)
    now = 60.0
    assert due.after(3)
    due.saved(0.25, 90.0)
    assert due.interval == 90.0


@pytest.mark.parametrize("given", ["100 steps", "100", 100, "100 step", "10 minutes", "10min", "1.5 h", "30s", "auto"])
def test_ways_to_say_how_often(given: Any) -> None:
    start(save_to="nowhere", save_every=given)


@pytest.mark.parametrize("given", ["0 steps", "1.5 steps", "often", "-1 s", "10 parsecs", 0])
def test_wrong_ways_to_say_how_often(given: Any) -> None:
    with pytest.raises(ConfigError, match=r'save_every.* "100 steps" or "10 minutes"'):
        start(save_to="nowhere", save_every=given)


def test_how_often_without_where() -> None:
    with pytest.raises(ConfigError, match="save_every needs a folder of checkpoints: set save_to"):
        start(save_every="auto")


# -- what goes wrong -----------------------------------------------------------------------------------------


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file can be longer than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save_without_room(path: str, wait: bool) -> tuple[list[float], list[str]]:
    engine = start()
    train(engine, 1)
    engine.save_checkpoint(path)
    losses = train(engine, 2)
    with warnings.catch_warnings(record=True) as told, disk_of(4096 if engine.mesh.rank else 100_000_000):
        warnings.simplefilter("always")
        if wait:
            with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*/step-00000002: .*too large"):
                engine.save_checkpoint(path)
        else:
            engine.save_checkpoint(path, wait=False)
            engine._keeper.saver.settle()
        losses += train(engine, 3)
    engine.save_checkpoint(path)
    return losses, [str(warning.message) for warning in told if warning.category is TrainingWarning]


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_on_one_rank_leaves_training_running_and_the_old_checkpoint_whole(
    wait: bool, tmp_path: Path
) -> None:
    results = everywhere(save_without_room, 2, str(tmp_path), wait, processes=True)
    assert there(tmp_path) == ["latest", "step-00000001", "step-00000003"]
    alone = start()
    assert train(alone, 3)[1:] == results[0][0] == results[1][0]
    again = start()
    assert again.load_checkpoint(tmp_path / "step-00000001").name == "step-00000001"
    told = results[0][1]
    assert len(told) == (not wait)
    assert all("step-00000002: [Errno 27] File too large" in text for text in told)
    assert all(text.endswith("training goes on, earlier checkpoints are whole") for text in told)
    assert results[1][1] == []


class Crash(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_moment_of_publishing_leaves_a_whole_checkpoint(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each call that changes the disk; ``again``: a checkpoint of that name is there already."""
    left = 0

    def fragile(call: Any) -> Any:
        def wrapped(*args: Any, **others: Any) -> Any:
            nonlocal left
            for change in (lambda: None, lambda: call(*args, **others)):
                left -= 1
                if left == 0:
                    raise Crash
                result = change()
            return result

        return wrapped

    for owner, name in (
        (Path, "rename"), (Path, "replace"), (Path, "unlink"), (folder.shutil, "rmtree"), (folder, "write_through"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, fragile(getattr(owner, name)))
    moments = 0
    while True:
        moments += 1
        directory = tmp_path / str(moments)
        for steps in (1, 2, 3) if again else (1, 2):
            left = 0
            make(directory, steps, "old")
        make(directory, 3, "new", publish=False)
        left = moments
        try:
            folder.publish(directory / folder.partial_name(3), "new", keep=2)
            break
        except Crash:
            left = 0
        first, *_ = folder.candidates(directory)
        assert (first / "data").read_text() == (first / MANIFEST).read_text()
        assert first.name.endswith("step-00000003") or not again
        folder.sweep(directory)
        assert folder.candidates(directory)
        make(directory, 4, "next")
        assert folder.candidates(directory)[0].name == "step-00000004"
    assert moments > 10


def make(directory: Path, steps: int, contents: str, *, publish: bool = True) -> None:
    partial = directory / folder.partial_name(steps)
    partial.mkdir(parents=True)
    (partial / "data").write_text(contents)
    if publish:
        folder.publish(partial, contents, keep=None)


# -- what else is kept ---------------------------------------------------------------------------------------


class Loader:
    """Stands for a data loader that can be asked where it is."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("registered", ["before", "after"])
def test_what_is_registered_comes_back_on_every_rank(registered: str, tmp_path: Path) -> None:
    def save() -> None:
        engine = start(data_parallel=2)
        engine.register("data", Loader(10 + engine.mesh.data_rank))
        train(engine, 2)
        assert engine.items == 8
        engine.save_checkpoint(tmp_path)

    def load() -> tuple[int, int]:
        engine, loader = start(data_parallel=2), Loader(0)
        if registered == "before":
            engine.register("data", loader)
        engine.load_checkpoint(tmp_path)
        if registered == "after":
            engine.register("data", loader)
        return loader.place, engine.items

    run_local(save, 4)
    assert run_local(load, 4) == [(10, 8), (10, 8), (11, 8), (11, 8)]


def test_a_registered_state_of_another_number_of_ranks(tmp_path: Path) -> None:
    def save() -> None:
        engine = start(data_parallel=2)
        engine.register("data", Loader(3))
        engine.save_checkpoint(tmp_path)

    run_local(save, 2)
    engine = start()
    engine.register("data", Loader(0))
    with pytest.raises(CheckpointError, match="state of 'data' was saved by 2 data-parallel ranks, and there are 1"):
        engine.load_checkpoint(tmp_path)


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match="a list has no state_dict and load_state_dict"):
        start().register("data", [])


class Odd:
    """No tensor, number or text."""


def test_a_registered_state_that_could_not_be_loaded_again(tmp_path: Path) -> None:
    engine = start()
    loader = Loader(0)
    loader.place = Odd()  # type: ignore[assignment]
    engine.register("data", loader)
    with pytest.raises(CheckpointError, match="cannot be loaded safely again"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- going on by itself --------------------------------------------------------------------------------------


def restarted(path: str) -> tuple[int, list[float]]:
    engine = start(save_to=path, save_every="1 steps")
    first = engine.steps
    losses = train(engine, first + 2)
    engine.finish_saving()
    return first, losses


def test_a_restarted_run_goes_on_with_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(start(), 6)
    found = []
    for restarts, ranks in enumerate((2, 3, 1)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        first, losses = run_local(restarted, ranks, str(tmp_path))[0]
        assert first == 2 * restarts
        found += losses
    assert found == alone


def test_a_fresh_run_begins_anew_unless_told_to_resume(tmp_path: Path) -> None:
    run_local(restarted, 1, str(tmp_path))
    assert start(save_to=tmp_path).steps == 0
    assert start(save_to=tmp_path, resume=True).steps == 2
    with pytest.warns(TrainingWarning, match=f"there is no checkpoint in {tmp_path / 'empty'} yet: training begins"):
        start(save_to=tmp_path / "empty", resume=True)


# -- being asked to end --------------------------------------------------------------------------------------


def test_a_rank_that_is_asked_to_stop_stops_all_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    def worker() -> int:
        engine = start(save_to=tmp_path)
        train(engine, 2)
        if engine.mesh.rank == 1:
            engine.request_stop()
        train(engine, 3)
        assert engine.should_stop
        with pytest.raises(TrainingStopped):
            train(engine, 4)
        return engine.steps

    assert run_local(worker, 2) == [3, 3]
    assert there(tmp_path) == ["latest", "step-00000003"]


ENDLESS = """
    import sys
    from tests.pipeline.test_saving import items, start

    engine = start(save_to=sys.argv[1])
    while True:  # it never looks at should_stop
        engine.train_batch(items(engine.steps, 0))
        print(engine.steps, flush=True)
"""


def test_sigterm_finishes_the_step_saves_and_exits_with_0(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENDLESS), str(tmp_path / "checkpoints")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    last = int(output.split()[-1]) if output else 1
    assert there(tmp_path / "checkpoints") == ["latest", f"step-{last:08d}"]
