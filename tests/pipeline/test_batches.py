"""Micro-batches of any size, shape and number: the step is the mean over their samples, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, add_loss, initialize, run_local, split_batch
from pipeline.batch import Item
from pipeline.errors import DataError
from pipeline.links.protocol import LANE_CONTROL
from tests.pipeline.conftest import Sent
from tests.pipeline.processes import run_processes
from tests.pipeline.reference import Case, Layout, Outcome, agree, check, check_all, plainly, run, spread, train

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 4


def network(loss_fn: Any = functional.mse_loss, **others: Any) -> PipelineModule:
    linear, tanh = LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Tanh()
    return PipelineModule([linear, tanh, linear, tanh, linear], loss_fn, **others)


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this many samples."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


def cut(sizes: Sequence[int], seed: int = 0) -> list[Item]:
    """``rows(sum(sizes))`` in micro-batches of these sizes."""
    inputs, targets = rows(sum(sizes), seed)
    return [Item(*pair) for pair in zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)]


def descent(groups: Any) -> torch.optim.Optimizer:
    """Subtracts the gradients."""
    return torch.optim.SGD(groups, lr=1.0)


def agree_with_one_batch(outcome: Outcome, loss: Any, count: int) -> None:
    """What was done equals one step on ``count`` samples at once, without micro-batches or weights."""
    model = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(4, 4) if i % 2 == 0 else nn.Tanh() for i in range(5)))})
    model.load_state_dict(dict(outcome.before))
    inputs, targets = rows(count)
    expected = loss(model["layers"](inputs), targets)
    expected.backward()
    assert outcome.losses[0] == pytest.approx(expected.item(), rel=1e-14)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.before[name] - outcome.after[name], parameter.grad, rtol=1e-11, atol=1e-13)


# -- uneven sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", spread(5), ids=str)
def test_ten_samples_in_uneven_micro_batches_have_the_mean_of_ten(layout: Layout) -> None:
    """Also where two copies of the pipeline get six and four of them."""
    sizes = (3, 3, 3, 1) if layout.data_parallel == 1 else (3, 1, 1, 1, 1, 1, 1, 1)
    case = Case(network, lambda step, rank: cut(sizes)[4 * rank : 4 * rank + 4], steps=1, optimizer=descent)
    agree_with_one_batch(run(case, layout), functional.mse_loss, 10)


def test_a_weight_of_ones_own() -> None:
    """A mean over tokens that are not padding, of which one micro-batch has none."""

    def counted(output: Tensor, targets: Tensor) -> Tensor:
        kept = (targets > 0).double()
        return ((output - targets) ** 2 * kept).sum() / kept.sum().clamp(min=1)

    def weight(targets: Tensor) -> float:
        return float((targets > 0).sum())

    def padded(step: int, rank: int) -> list[Item]:
        return [Item(x, y if i != 2 else -y.abs()) for i, (x, y) in enumerate(cut((3, 3, 3, 1)))]

    def whole(output: Tensor, targets: Tensor) -> Tensor:
        return counted(output, torch.cat([item.targets for item in padded(0, 0)]))

    for layout in (Layout("1f1b", 1), Layout("split", 4)):
        outcome = run(Case(lambda: network(counted, loss_weight=weight), padded, 1, descent), layout)
        agree_with_one_batch(outcome, whole, 10)


@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 1), Layout("vee", 2, 2), Layout("gpipe", 4, data_parallel=2)], ids=str
)
def test_a_micro_batch_without_weight_has_no_part_in_the_step(layout: Layout) -> None:
    """All of its targets are ignored, so that its mean is 0 / 0: neither that nor its gradient is seen anywhere."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        add_loss("also", output.square().mean() / (targets >= 0).sum().clamp(max=1))
        return functional.cross_entropy(output, targets)

    def items(step: int, rank: int, last: int) -> list[Item]:
        made = [Item(x, y.argmax(1)) for x, y in cut((3, 3, 3, 1), seed=step + 7 * rank)]
        return made[:-1] + [Item(made[-1].inputs, torch.full((1,), -100))] * last

    def model() -> PipelineModule:
        return network(loss, loss_weight=lambda targets: float((targets >= 0).sum()))

    with_it = Case(model, lambda step, rank: items(step, rank, 1))
    without = Case(model, lambda step, rank: items(step, rank, 0))
    found = run(with_it, layout)
    agree(found, plainly(without, layout, found.before), str(layout))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_is_a_scalar(shape: tuple[int, ...]) -> None:
    case = Case(lambda: network(lambda y, t: functional.mse_loss(y, t).reshape(shape)), lambda s, r: cut((2, 2, 2, 1)))
    check_all(case, [Layout("1f1b", 1), Layout("split", 4)])


def test_evaluation_is_the_same_mean() -> None:
    def worker(sizes: tuple[int, ...]) -> tuple[float, float]:
        engine = initialize(network(), config=Layout("1f1b", 4).settings(), optimizer=descent)
        evaluated = engine.eval_batch(cut(sizes)).item()
        return evaluated, engine.train_batch(cut(sizes)).item()

    results = [run_local(worker, 4, sizes) for sizes in [(3, 3, 3, 1), (10,), (1, 9)]]
    losses = [loss for result in results for rank in result for loss in rank]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-14)


# -- shapes --------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Lets positions see the mean of all, so that lengths matter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x - x.mean(1, keepdim=True)).tanh()


def language_model() -> PipelineModule:
    layers = [LayerSpec(nn.Embedding, 7, WIDTH), *[LayerSpec(Mixing)] * 4, LayerSpec(nn.Linear, WIDTH, 7)]
    return PipelineModule(layers, lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten()), torch.numel)


LENGTHS = [(5, 2, 7, 3), (7, 5, 3, 2), (2, 2, 2, 9), (9, 1, 2, 7), (9, 1, 2, 7)]
NEW = [4, 0, 1, 1, 0]  # lengths in each step that no step before had


def texts(step: int, rank: int) -> list[Item]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = [torch.randint(0, 7, (2, n + rank), generator=generator) for n in LENGTHS[step]]
    return [Item(x, (x * 3 + 1) % 7) for x in inputs]


def test_every_micro_batch_has_a_length_of_its_own() -> None:
    check_all(Case(language_model, texts, steps=5), [*spread(6), Layout("1f1b", 4), Layout("gpipe", 4)])


def train_on_texts() -> Outcome:
    torch.set_default_dtype(torch.float64)
    case = Case(language_model, texts, steps=5)
    return train(initialize(case.model(), config=Layout("1f1b", 4).settings(), optimizer=case.optimizer), case)


def test_every_micro_batch_has_a_length_of_its_own_between_processes() -> None:
    """A message that is longer than what was posted would end the process, a shorter one would be taken."""
    outcome = run_processes(train_on_texts, 4)[0]
    agree(outcome, plainly(Case(language_model, texts, steps=5), Layout("1f1b", 4), outcome.before), "processes")


def test_a_length_is_told_once(sent: Sent) -> None:
    """A header goes ahead of a message only where its shape is new; not for gradients, and never in a steady state."""
    headers: list[int] = []

    def worker() -> None:
        engine = initialize(language_model(), config=Layout("1f1b", 4).settings(), optimizer=descent)
        for step in range(5):
            engine.mesh.world.barrier()
            before = len([lane for lane, _ in sent if lane == LANE_CONTROL])
            engine.mesh.world.barrier()
            engine.train_batch(texts(step, 0))
            engine.mesh.world.barrier()
            if engine.mesh.rank == 0:
                headers.append(len([lane for lane, _ in sent if lane == LANE_CONTROL]) - before)
            engine.mesh.world.barrier()

    run_local(worker, 4)
    assert headers == [3 * new for new in NEW]


@pytest.mark.parametrize("rows_of", [3, 1])
def test_a_batch_that_becomes_smaller_and_larger_again(rows_of: int) -> None:
    sizes = [(rows_of,) * 4, (2, 2, 2, 2), (rows_of, 2, 5, 1)]
    check_all(Case(network, lambda step, rank: cut(sizes[step], step + 7 * rank), steps=3), spread(5))


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*spread(5, 8), Layout("late-first", 4, 1, 8)], ids=str)
def test_the_number_of_micro_batches_changes_from_step_to_step(layout: Layout) -> None:
    """More than before, fewer than ranks, only one: up to the number that is set."""
    counts = [2, 8, 1, 3, 7]
    check(Case(network, lambda step, rank: cut((2,) * counts[step], step + 7 * rank), steps=5), layout)


def test_ranks_in_the_middle_need_no_data() -> None:
    def worker() -> list[float]:
        engine = initialize(network(), config=Layout("1f1b", 4).settings(), optimizer=descent)
        source = iter(cut((2,) * 12)) if engine.mesh.pipe_rank in (0, 3) else None
        return [engine.train_batch(source).item(), engine.eval_batch(source).item(), engine.train_batch(source).item()]

    first, *others = run_local(worker, 4)
    assert others == [first] * 3


def test_an_iterator_is_read_one_step_at_a_time() -> None:
    read: list[int] = []

    def worker() -> None:
        def source() -> Any:
            for number, item in enumerate(cut((1,) * 12)):
                read.append(number)
                yield item

        engine = initialize(network(), config=Layout("1f1b", 1).settings(), optimizer=descent)
        items = source()
        for step in range(3):
            engine.train_batch(items)
            assert len(read) == 4 * (step + 1)

    run_local(worker, 1)


# -- whole batches -------------------------------------------------------------------------------------------


def test_only_what_has_the_size_of_the_batch_is_split() -> None:
    x, y = rows(8)
    scale, shift = torch.tensor(2.0), torch.arange(4.0)
    items = split_batch(((x, scale, {"shift": shift, "mode": "sum", "none": None}), y), 3)
    assert [len(item.targets) for item in items] == [3, 3, 2]
    assert torch.cat([item.inputs[0] for item in items]).equal(x)
    assert torch.cat([item.targets for item in items]).equal(y)
    assert all(item.inputs[1] is scale for item in items)
    assert all(item.inputs[2] == {"shift": shift, "mode": "sum", "none": None} for item in items)


def test_what_could_be_meant_both_ways_must_be_declared() -> None:
    """A vector of 4 beside 4 rows of 4 features: one number a row, or one a feature?"""
    x, y = rows(4)
    vector = torch.arange(4.0)
    with pytest.raises(DataError, match=r"inputs\[1\] is a vector of 4.*declare split=\{'inputs\[1\]': True\}"):
        split_batch(((x, vector), y), 2)
    split = split_batch(((x, vector), y), 2, split={"inputs[1]": True})
    assert [item.inputs[1].tolist() for item in split] == [[0.0, 1.0], [2.0, 3.0]]
    whole = split_batch(((x, vector), y), 2, split={"inputs[1]": False})
    assert [item.inputs[1].tolist() for item in whole] == [vector.tolist()] * 2


@pytest.mark.parametrize(
    ("batch", "count", "split", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), 2, {}, "targets has 3 rows but the batch has 4; declare split="),
        ((torch.zeros(4, 2), None), 5, {}, r"cannot cut 4 samples into 5 micro-batches; set micro_batches to 1..4"),
        ((torch.zeros(4, 2), None), 0, {}, "cannot cut 4 samples into 0 micro-batches"),
        ((torch.zeros(()), torch.zeros(4)), 2, {}, "the inputs hold no tensor with a leading dimension"),
        ((torch.zeros(4, 2), None), 2, {"input": True}, "split names 'input', but the leaves of the batch are inputs"),
        ((torch.zeros(4), torch.zeros(())), 2, {"targets": True}, "targets as cut, but it has no leading dimension"),
        ((torch.zeros(4), torch.zeros(5)), 2, {"targets": True}, "targets as cut, but its leading size is 5, not 4"),
        (torch.zeros(4, 2), 2, {}, r"a batch is a pair \(inputs, targets\), targets may be None; got a Tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut(batch: Any, count: int, split: dict[str, bool], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_batch(batch, count, split=split)


def test_a_batch_that_was_split_trains_as_the_whole() -> None:
    class Scaled(nn.Module):
        def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            x, scale, shift = inputs
            return (x - shift) / scale

    def split(step: int, rank: int) -> list[Item]:
        x, y = rows(10)
        return split_batch(((2 * x + torch.arange(4.0), torch.tensor(2.0), torch.arange(4.0)), y), 4)

    layers = [LayerSpec(Scaled), *(nn.Tanh() if i % 2 else LayerSpec(nn.Linear, 4, 4) for i in range(5))]
    outcome = run(Case(lambda: PipelineModule(layers, functional.mse_loss), split, 1, descent), Layout("1f1b", 3))

    def down(state: Any) -> dict[str, Tensor]:
        return {f"layers.{int(name.split('.')[1]) - 1}.{name.split('.')[2]}": t for name, t in state.items()}

    renamed = Outcome(down(outcome.before), outcome.losses, (), (), down(outcome.after))
    agree_with_one_batch(renamed, functional.mse_loss, 10)


# -- inputs and targets --------------------------------------------------------------------------------------

TARGETS: dict[str, tuple[Any, Any]] = {
    "a tuple": (lambda y: (y, y.abs()), lambda out, t: functional.mse_loss(out, t[0]) + (out * t[1]).mean()),
    "a dict": (lambda y: {"a": y, "b": None}, lambda out, t: functional.mse_loss(out, t["a"])),
    "integers": (lambda y: y.argmax(1), functional.cross_entropy),
    "absent": (lambda y: None, lambda out, t: out.square().mean() if t is None else out.sum()),
    "a number": (lambda y: 0.5, lambda out, t: (out - t).square().mean()),
    "one for all": (lambda y: torch.tensor(0.5), lambda out, t: (out - t).square().mean()),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_any_form(name: str) -> None:
    make, loss = TARGETS[name]

    def items(step: int, rank: int) -> list[Item]:
        return [Item(x, make(y)) for x, y in cut((3, 3, 3, 1), step + 7 * rank)]

    check_all(Case(lambda: network(loss), items), [Layout("1f1b", 1), Layout("1f1b", 4), Layout("vee", 2, 2)])


def test_a_loss_without_targets_weighs_rows_of_the_inputs() -> None:
    case = Case(
        lambda: network(lambda out, _: out.square().mean()),
        lambda step, rank: [Item(x, None) for x, _ in cut((3, 3, 3, 1))],
        steps=1,
        optimizer=descent,
    )
    agree_with_one_batch(run(case, Layout("1f1b", 3)), lambda out, _: out.square().mean(), 10)


INPUTS: dict[str, tuple[Any, Any]] = {
    "a tuple": (lambda x: (x, 2.0, None), lambda v: v[0] * v[1]),
    "a dict": (lambda x: {"x": x, "ids": (x > 0).long()}, lambda v: v["x"] * v["ids"]),
    "a list in a dict": (lambda x: {"x": [x, {"y": x}]}, lambda v: v["x"][0] * v["x"][1]["y"]),
    "a view": (lambda x: x.t().contiguous().t(), lambda v: v * 2),
    "a leaf that asks for a gradient": (lambda x: x.clone().requires_grad_(), lambda v: v * 2),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_any_form(name: str) -> None:
    make, use = INPUTS[name]

    def items(step: int, rank: int) -> list[Item]:
        return [Item(make(x), y) for x, y in cut((3, 2, 3, 1), step + 7 * rank)]

    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    case = Case(lambda: PipelineModule([use, linear, linear, linear], functional.mse_loss), items)
    check_all(case, [Layout("1f1b", 1), Layout("1f1b", 4), Layout("gpipe", 2, recompute="every")])
