"""Rows in whatever items, cut into micro-batches of a size that is set, chosen, or changed while training runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from partition import LayerCost, OutOfMemory, Profile
from pipeline import LayerSpec, PipelineConfig, PipelineModule, initialize, run_local, sizing
from pipeline.batch import Item, rows_of
from pipeline.errors import ConfigError, DataError
from pipeline.recut import read_rows
from tests.pipeline.own_clock import taking

WIDTH = 4

# -- rows ----------------------------------------------------------------------------------------------------


def items(sizes: list[int]) -> list[Item]:
    rows = torch.arange(float(sum(sizes)))
    return [Item({"x": part, "scale": 2}, (part, None)) for part in rows.split(sizes)]


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), data=st.data())
def test_all_rows_are_there_once_and_in_order(sizes: list[int], data: Any) -> None:
    rows = sum(sizes)
    number = data.draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    source = iter([*items(sizes), "never taken"])
    found, taken = read_rows(source, rows, number)
    assert taken == len(sizes)
    assert [len(item.inputs["x"]) for item in found] == [rows // number] * number
    assert torch.equal(torch.cat([item.inputs["x"] for item in found]), torch.arange(float(rows)))
    assert all(torch.equal(item.targets[0], item.inputs["x"]) for item in found)
    assert {item.inputs["scale"] for item in found} == {2}
    assert next(source) == "never taken"


def test_items_of_the_size_that_is_wanted_are_handed_on_as_they_are() -> None:
    own = items([2, 2, 2])
    found, _ = read_rows(iter(own), 6, 3)
    assert all(mine.inputs is theirs.inputs for mine, theirs in zip(found, own, strict=True))


def test_what_is_left_at_the_end_of_the_data_is_a_shorter_step() -> None:
    found, taken = read_rows(iter(items([3, 2])), 8, 4)
    assert taken == 2
    assert [len(item.inputs["x"]) for item in found] == [2, 2, 1]
    assert read_rows(iter([]), 8, 4) == ([], 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (items([3, 3]), r"items of 3, 3 rows do not add up to 4, .* let global_batch be a multiple"),
        ([Item(torch.ones(2), torch.ones(3))], r"its rows as their leading size.*found leading sizes \[2, 3\]"),
        ([Item(torch.ones(()), None)], r"found leading sizes \[\]"),
        ([Item(torch.ones(2), 1), Item(torch.ones(2), 2)], "different values that are no rows"),
        ([Item(torch.ones(2), None), Item((torch.ones(2),), None)], "differ in structure"),
    ],
    ids=["too many", "two sizes", "no rows", "other values", "other structures"],
)
def test_items_that_cannot_be_joined_are_refused(source: list[Item], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_rows(iter(source), 4, 1)


# -- settings ------------------------------------------------------------------------------------------------


def test_the_number_follows_from_the_rows() -> None:
    assert PipelineConfig(global_batch=64, data_parallel=2, micro_batch=4).micro_batches == 8
    assert PipelineConfig(global_batch=64, micro_batches=16).micro_batches == 16
    assert PipelineConfig(global_batch=12, micro_batch="auto").micro_batches == 6  # to begin with
    config = PipelineConfig.load(None, ["--global-batch", "32", "--micro-batch", "2"])
    assert config.micro_batches == 16
    assert PipelineConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch": 64, "micro_batch": 5}, "micro_batch = 5 does not divide the 64 rows .* 1, 2, 4, 8, 16, 32"),
        ({"global_batch": 60}, "micro_batches = 8 does not divide the 60 rows"),
        ({"global_batch": 61, "data_parallel": 2}, "cannot be shared equally by data_parallel = 2"),
        ({"global_batch": 64, "micro_batch": 2, "micro_batches": 4}, "are 32 micro-batches of 2; leave one of the two"),
        ({"micro_batch": 4}, "micro_batch is about how many rows a step has: set global_batch"),
        ({"balance_micro_batch": "auto"}, "balance_micro_batch is about how many rows"),
        ({"global_batch": 8, "micro_batch": 0}, "it must be a number of rows, at least 1, or auto"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**settings)


# -- training ------------------------------------------------------------------------------------------------


def model(layers: int = 4) -> PipelineModule:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return PipelineModule([linear for _ in range(layers)], functional.mse_loss)


def batches(data_rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(data_rank)
    while True:
        rows = torch.randn(2, 24, WIDTH, generator=generator, dtype=torch.float64)
        yield from zip(*(half.split(size) for half in rows), strict=True)


def losses(settings: dict[str, Any], size: int, steps: int = 4) -> tuple[list[float], int, int]:
    """The losses of some steps on items of this size; the items taken, and the number of micro-batches."""
    config = {"partition": "uniform", **settings}
    engine = initialize(model(), config=config, optimizer=partial(torch.optim.AdamW, eps=1e-4))
    data = batches(engine.mesh.data_rank, size)
    found = [engine.train_batch(data).item() for _ in range(steps)]
    return found, engine.items, engine.config.micro_batches


@pytest.mark.parametrize("size", [1, 4, 8, 24])
@pytest.mark.parametrize("micro_batch", [1, 6, 24])
def test_how_rows_come_and_are_cut_changes_the_losses_by_rounding_only(size: int, micro_batch: int) -> None:
    expected, _, _ = run_local(losses, 4, {"data_parallel": 2, "micro_batches": 3}, 8)[0]
    settings = {"data_parallel": 2, "global_batch": 48, "micro_batch": micro_batch}
    for found, taken, number in run_local(losses, 4, settings, size):
        assert found == pytest.approx(expected, rel=1e-12)
        assert (taken, number) == (4 * 24 // size, 24 // micro_batch)


def costs(a: float, b: float, kept: int = 0) -> Any:
    """In place of timing: layers that take a + b·rows."""

    def on(item: Item, *others: Any) -> Profile:
        rows = rows_of(item)
        assert rows is not None
        cost = LayerCost(
            name="l", type="Linear", forward=a + b * rows, input_grad=a + b * rows, weight_grad=0.0,
            activation_bytes=kept * rows, parameters=20, parameter_bytes=160,
        )  # fmt: skip
        return Profile(layers=(cost,) * 4, rows=rows)

    return on


AUTO = {"global_batch": 24, "micro_batch": "auto", "partition": "profile"}


@pytest.mark.parametrize(("a", "b", "number"), [(1.0, 0.0, 1), (0.0, 1.0, 24), (1.0, 1.0, 4)])
def test_auto_takes_the_number_with_the_shortest_step(
    a: float, b: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two stages m micro-batches take (m + 1)(a + b·24/m) for each layer, forward and backward."""
    monkeypatch.setattr(sizing, "profile_on", costs(a, b))
    expected, _, _ = run_local(losses, 1, {"micro_batches": 3}, 8)[0]
    for found, taken, chosen in run_local(losses, 2, AUTO, 8):
        assert chosen == number
        assert taken == 12
        assert found == pytest.approx(expected, rel=1e-12)


def test_auto_keeps_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "profile_on", costs(1.0, 0.0, kept=1000))
    # Rank 0 of 1f1b keeps two micro-batches of two layers: 4000 bytes a row, beside 2·20·(8 + 12) = 800 of its weights.
    limit = {"memory_limit": 800 + 4000 * 6 + 100}
    assert {number for *_, number in run_local(losses, 2, {**AUTO, **limit}, 8)} == {4}
    with pytest.raises(OutOfMemory, match="no size of micro-batch keeps within memory_limit"):
        run_local(losses, 2, {**AUTO, "memory_limit": 900}, 8)


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "profile_on", costs(1.0, 1.0))

    def notes() -> tuple[str, ...]:
        engine = initialize(model(), config=AUTO, optimizer=torch.optim.SGD)
        engine.train_batch(batches(0, 8))
        return engine.notes

    # 2 layers · 2 · (m + 1)(1 + 24/m): 140 for 4, 144 for 6
    expected = "micro-batches: 4 of 6 rows, by which a step is predicted to take 140 s; 6 of 4 would take 140 s"
    assert run_local(notes, 2)[0][0].split(";")[0] == expected.split(";")[0]


def test_auto_with_a_profile_of_one_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="times the layers at two sizes, and a profile is of one"):
        initialize(model(), config=AUTO, optimizer=torch.optim.SGD, profile=costs(1.0, 1.0)(items([4])[0]))


def test_a_run_goes_on_with_the_size_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "profile_on", costs(0.0, 1.0))

    def begin() -> list[float]:
        engine = initialize(model(), config={**AUTO, "save_to": tmp_path}, optimizer=torch.optim.SGD)
        data = batches(0, 8)
        engine.train_batch(data)
        engine.save_checkpoint()
        return [engine.train_batch(data).item()]

    def go_on() -> tuple[list[float], int, int]:
        engine = initialize(model(), config={**AUTO, "save_to": tmp_path, "resume": True}, optimizer=torch.optim.SGD)
        data = batches(0, 8)
        for _ in range(engine.items):
            next(data)
        return [engine.train_batch(data).item()], engine.config.micro_batches, engine.items

    expected = run_local(begin, 2)[0]
    monkeypatch.setattr(sizing, "profile_on", costs(1.0, 0.0))  # would choose otherwise now
    assert run_local(go_on, 2)[0] == (expected, 24, 6)


# -- while training runs -------------------------------------------------------------------------------------


class Paced(nn.Module):
    """A linear layer that takes a + b·rows seconds each way, as the clock says."""

    def __init__(self, clock: list[tuple[float, float]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.clock[0]
        return taking(self.linear(x), a + b * len(x))


def paced(settings: dict[str, Any]) -> tuple[list[int], list[float], tuple[str, ...]]:
    """The numbers of micro-batches of steps in which calls are dear, and then rows are; and the losses."""
    clock = [(0.006, 0.0)]
    module = PipelineModule([LayerSpec(Paced, clock) for _ in range(2)], functional.mse_loss)
    config = {"partition": "uniform", "global_batch": 24, "micro_batches": 4, "balance_window": 3, **settings}
    engine = initialize(module, config=config, optimizer=partial(torch.optim.AdamW, eps=1e-4))
    data, numbers, found = batches(0, 8), [], []
    for step in range(24):
        if step == 12:
            clock[0] = (0.0002, 0.001)
        found.append(engine.train_batch(data).item())
        numbers.append(engine.config.micro_batches)
    return numbers, found, engine.notes


@pytest.mark.usefixtures("own_time")
def test_the_size_follows_what_layers_cost() -> None:
    numbers, found, notes = run_local(paced, 2, {"balance_micro_batch": "auto"})[0]
    assert numbers[9] <= 2  # where a call costs as much whatever it holds
    assert len(set(numbers[12:])) > 1  # where each row costs, and stages that wait for it wait
    assert sum("to see what that costs" in note for note in notes) >= 2
    assert any("a step should take" in note for note in notes)
    fixed, expected, _ = run_local(paced, 2, {})[0]
    assert set(fixed) == {4}
    assert found == pytest.approx(expected, rel=1e-12)
