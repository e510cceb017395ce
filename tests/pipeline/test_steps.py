"""Steps of every kind: evaluation, randomness, norms and added losses."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, add_loss, initialize, run_local
from pipeline.batch import Item
from pipeline.random_state import preserved
from tests.pipeline.blocks import SIZES, WIDTH, Block, blocks, items, start
from tests.pipeline.reference import Case, Layout, Outcome, Plain, agree, check, plainly, run, spread, train

pytestmark = pytest.mark.usefixtures("double_precision")

# -- evaluation ----------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes in which mode it runs."""

    def __init__(self, modes: list[tuple[bool, bool, bool]]) -> None:
        super().__init__()
        self.modes = modes
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.modes.append((self.training, torch.is_grad_enabled(), y.requires_grad))
        return y


@dataclass(frozen=True)
class Seen:
    """What one rank saw of training with evaluation before, between and after."""

    outcome: Outcome
    evaluated: tuple[float, ...]
    outputs: tuple[Any, Any]
    modes: tuple[tuple[bool, bool, bool], ...]


def train_and_evaluate(case: Case, layout: Layout, modes: list[tuple[bool, bool, bool]]) -> Seen:
    engine = start(case.model, layout)
    mine = engine.mesh.data_rank
    evaluated = [engine.eval_batch(items(7, mine)).item()]
    first = engine.forward(items(7, mine))
    assert engine._run_steps.last[1].schedule.forward_only
    engine.mesh.world.barrier()
    before_training = tuple(modes)
    engine.mesh.world.barrier()
    outcome = train(engine, case)
    evaluated += [engine.eval_batch(items(7, mine)).item() for _ in range(2)]
    return Seen(outcome, tuple(evaluated), (first, engine.forward(items(7, mine))), before_training)


@pytest.mark.parametrize(
    "layout", [*spread(6), Layout("1f1b", 6), Layout("gpipe", 2), Layout("late-first", 3)], ids=str
)
def test_evaluation_before_and_after_training(layout: Layout) -> None:
    """Without gradients, dropout or effect; training goes on as if there had been none."""
    modes: list[tuple[bool, bool, bool]] = []
    norm = nn.BatchNorm1d if layout.data_parallel == 1 and layout.schedule != "late-first" else nn.LayerNorm

    def model() -> PipelineModule:
        return blocks(LayerSpec(Watched, modes), LayerSpec(norm, WIDTH), dropout=0.5)

    case = Case(model, lambda step, rank: items(step, rank, (2, 3, 2, 2)))
    results = run_local(train_and_evaluate, layout.ranks, case, layout, modes)
    first = results[0]
    assert all((r.evaluated, r.outcome.losses) == (first.evaluated, first.outcome.losses) for r in results)
    assert set(first.modes) == {(False, False, False)}
    assert (True, True, True) in modes
    assert first.evaluated[0] != first.evaluated[1] == first.evaluated[2]
    agree(first.outcome, plainly(case, layout, first.outcome.before), str(layout))
    for state, loss, when in ((first.outcome.before, 0, 0), (first.outcome.after, 1, 1)):
        expected = plain_outputs(model(), state, layout)
        rows = sum(len(y) for copy in expected for y, _ in copy)
        mean = sum(float(value) * len(y) / rows for copy in expected for y, value in copy)
        assert first.evaluated[loss] == pytest.approx(mean, rel=1e-12)
        for rank, result in enumerate(results):
            copy, place = divmod(rank, layout.ranks // layout.data_parallel)
            if place != rank_of_last_stage(layout):
                assert result.outputs[when] is None
                continue
            for mine, (theirs, _) in zip(result.outputs[when], expected[copy], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def rank_of_last_stage(layout: Layout) -> int:
    """The pipeline rank that has the outputs."""
    return 0 if layout.schedule == "vee" else layout.ranks // layout.data_parallel - 1


def plain_outputs(module: PipelineModule, state: Any, layout: Layout) -> list[list[tuple[Tensor, Tensor]]]:
    """Output and loss of each micro-batch of ``items(7, ...)``, for each copy of the pipeline."""
    with preserved(torch.device("cpu")), torch.no_grad():
        model = Plain(module)
        for name, tensor in model.tensors().items():
            tensor.copy_(state[name])
        model.eval()
        return [[model(item, 0, 0, []) for item in items(7, copy)] for copy in range(layout.data_parallel)]


@pytest.mark.parametrize("partition", ["uniform", "profile"])
@pytest.mark.parametrize("layout", [Layout("1f1b", 3), Layout("vee", 2, 2), Layout("split", 1)], ids=str)
def test_evaluation_without_targets(layout: Layout, partition: str) -> None:
    """By a loss that needs none, or of outputs alone, whose structure is the last layer's."""

    class Ending(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"y": x, "both": (x.sum(), None), "name": "last"}

    def model() -> PipelineModule:
        return blocks(Block, Block, Block, Block, Ending, loss_fn=lambda out, t: out["y"].square().mean())

    def worker() -> tuple[float, Any]:
        engine = initialize(model(), config=layout.settings(partition=partition))  # no optimizer either
        unlabelled = [Item(x, None) for x, _ in items(0, 0)]
        outputs = engine.forward(iter(unlabelled))
        return engine.eval_batch(unlabelled).item(), outputs

    results = run_local(worker, layout.ranks)
    [outputs] = [outputs for _, outputs in results if outputs is not None]
    squares = torch.cat([out["y"] for out in outputs]).square().mean().item()
    assert [loss for loss, _ in results] == [pytest.approx(squares, rel=1e-14)] * layout.ranks
    assert [len(out["y"]) for out in outputs] == list(SIZES)
    assert all(out["both"][0] == out["y"].sum() and out["both"][1] is None and out["name"] == "last" for out in outputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_mode_of_the_caller_does_not_matter(mode: Any, ranks: int) -> None:
    """A loop that evaluates, or all of it, under no_grad or inference_mode; tensors made there are fit to evaluate."""

    def worker(inside: Any) -> list[float]:
        engine = start(lambda: blocks(dropout=0.3), Layout("1f1b", ranks))
        losses = []
        for step in range(2):
            data = items(step, 0)
            with inside():
                made = [Item(x * 1, y * 1) for x, y in data]
                losses += [engine.eval_batch(made).item(), engine.train_batch(data).item()]
        return losses

    assert run_local(worker, ranks, mode) == run_local(worker, ranks, nullcontext)


# -- an order of its own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_are_told_by_micro_batch_and_not_by_when_they_are_ready(ranks: int) -> None:
    """In an order that finishes 1 before 0, with unlike sizes and an odd number of them."""
    layout = Layout("late-first", ranks, 1, 5)
    case = Case(blocks, lambda step, rank: items(step, rank, (1, 4, 2, 3, 2)))
    found = check(case, layout)
    usual = run(case, replace(layout, schedule="1f1b"))
    assert found.losses[0] == usual.losses[0]  # the same sum, in the same order

    def outputs(schedule: str) -> Any:
        def worker() -> Any:
            return start(blocks, replace(layout, schedule=schedule)).forward(items(0, 0, (1, 4, 2, 3, 2)))

        return run_local(worker, ranks)[-1]

    late, early = outputs("late-first"), outputs("1f1b")
    assert [len(y) for y in late] == [1, 4, 2, 3, 2]
    assert all(mine.equal(theirs) for mine, theirs in zip(late, early, strict=True))


# -- random numbers ------------------------------------------------------------------------------------------


class Noise(nn.Module):
    """Draws in every mode, in several ways, and only where the content says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            x = functional.dropout(x, 0.3)
        return self.linear(x + 0.1 * torch.randn_like(x)) * torch.bernoulli(torch.full((WIDTH,), 0.7))


def random_model() -> PipelineModule:
    return blocks(Block, Noise, nn.Dropout, dropout=0.4)


CUTS = [
    Layout("1f1b", 1),
    Layout("1f1b", 1, recompute="every"),
    Layout("1f1b", 2, partition=(1,)),
    Layout("gpipe", 2, partition=(5,), recompute=(2, 3)),
    Layout("split", 3, recompute="every"),
    Layout("1f1b", 4, partition=(1, 2, 3)),
    Layout("interleaved-1f1b", 2, 3, recompute="every:2"),
    Layout("vee", 2, 2),
]


def test_dropout_has_the_same_masks_on_every_layout() -> None:
    """To the last bit, recomputed or not, in training and where a layer draws in evaluation too."""

    def worker(layout: Layout) -> tuple[Outcome, float]:
        engine = start(random_model, layout)
        outcome = train(engine, Case(random_model, items, steps=3))
        return outcome, engine.eval_batch(items(9, 0)).item()

    (alone, evaluated), *others = [run_local(worker, layout.ranks, layout)[0] for layout in CUTS]
    agree(alone, plainly(Case(random_model, items, steps=3), CUTS[0], alone.before), "plain")
    for layout, (outcome, loss) in zip(CUTS[1:], others, strict=True):
        assert (outcome.losses, outcome.norms, loss) == (alone.losses, alone.norms, evaluated), str(layout)
        assert all(outcome.after[name].equal(tensor) for name, tensor in alone.after.items()), str(layout)


def test_copies_of_a_pipeline_draw_numbers_of_their_own() -> None:
    """As the same micro-batches would on one copy that has them all."""
    check(Case(random_model, items), Layout("1f1b", 4, data_parallel=2))
    same = Case(random_model, lambda step, rank: items(step, 0))
    doubled = Case(random_model, lambda step, rank: items(step, 0) * 2)
    two = run(same, Layout("1f1b", 4, data_parallel=2))
    one = run(doubled, Layout("1f1b", 2, micro_batches=8))
    assert two.losses == pytest.approx(one.losses, rel=1e-13)
    assert two.losses != pytest.approx(run(same, Layout("1f1b", 2)).losses, rel=1e-3)


def test_layers_that_come_to_draw_later() -> None:
    """A dropout rate that rises from 0: ranks which share a generator must not find out too late."""

    class Rising(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.dropout.p = 0.0 if self.calls <= 2 * len(SIZES) else 0.5
            return super().forward(x)

    case = Case(lambda: blocks(*[Rising] * 5), items, steps=5)
    first, *others = [run(case, layout) for layout in (Layout("1f1b", 1), Layout("1f1b", 3), Layout("gpipe", 6))]
    for outcome in others:
        assert outcome.losses == first.losses
        assert all(outcome.after[name].equal(tensor) for name, tensor in first.after.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_users_generator_is_left_alone(ranks: int) -> None:
    torch.manual_seed(17)
    expected = torch.rand(3)
    torch.manual_seed(17)
    run(Case(random_model, items), Layout("1f1b", ranks))
    assert torch.rand(3).equal(expected)


# -- norms ---------------------------------------------------------------------------------------------------


def eight(number: int) -> Case:
    """Eight samples a step in this many micro-batches."""

    def cut(step: int, rank: int) -> list[Item]:
        x, y = items(step, 0, (8,))[0]
        return [Item(*pair) for pair in zip(x.chunk(number), y.chunk(number), strict=True)]

    return Case(lambda: blocks(loss_fn=lambda y, t: 10 * functional.mse_loss(y, t)), cut, steps=3)


def test_the_gradient_norm_does_not_depend_on_how_samples_are_cut() -> None:
    """One number on every rank and layout, that of plain PyTorch; clipping goes by it."""
    layouts = [("1f1b", 1, 1), ("split", 4, 1), ("vee", 2, 2)]
    cases = [(eight(number), Layout(*layout, number)) for number in (1, 2, 4, 8) for layout in layouts]
    outcomes = [run(case, layout, gradient_clipping=1.0) for case, layout in cases]
    expected = plainly(eight(1), Layout(micro_batches=1), outcomes[0].before, clip=1.0)
    assert min(expected.norms) > 2.0  # so that clipping has something to do
    for outcome, (_, layout) in zip(outcomes, cases, strict=True):
        agree(outcome, expected, str(layout))
    assert outcomes[6].norms == outcomes[7].norms == outcomes[8].norms  # four micro-batches on each of the layouts


def test_the_gradient_norm_over_copies_of_a_pipeline() -> None:
    halves = Case(eight(1).model, lambda step, rank: eight(8).items(step, 0)[4 * rank : 4 * rank + 4], steps=3)
    outcome = run(halves, Layout("1f1b", 6, data_parallel=2), gradient_clipping=1.0)
    agree(outcome, plainly(eight(1), Layout(micro_batches=1), outcome.before, clip=1.0), "copies")


# -- added losses --------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two experts and a router, which a balance term keeps from always choosing the same one."""

    def __init__(self, name: str = "balance") -> None:
        super().__init__()
        self.name = name
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        add_loss(self.name, (shares.mean(0) ** 2).sum())
        add_loss("size", 0.01 * self.router.weight.square().sum())
        return x + sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@pytest.mark.parametrize("layout", [*spread(6), Layout("1f1b", 6)], ids=str)
def test_a_loss_added_in_the_middle(layout: Layout) -> None:
    """Its gradient enters there; its weighted mean is told on every rank, once under recomputation."""
    case = Case(lambda: blocks(Block, Experts, LayerSpec(Experts, "second")), items, steps=3)
    found = check(case, layout)
    assert set(found.added[0]) == {"balance", "second", "size"}
    assert set(run_local(lambda: tuple(sorted(losses_of_evaluation(case, layout))), layout.ranks)) == {
        ("balance", "second", "size")
    }


def losses_of_evaluation(case: Case, layout: Layout) -> dict[str, float]:
    engine = start(case.model, layout)
    engine.eval_batch(items(0, engine.mesh.data_rank))
    return engine.losses()


@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 1), Layout("split", 3), Layout("gpipe", 3, recompute="every")], ids=str
)
def test_losses_added_at_either_end_and_by_the_loss_itself(layout: Layout) -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        add_loss("size of outputs", 0.1 * output.square().mean())
        return functional.mse_loss(output, targets)

    class Penalised(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            add_loss("weights", self.weight.abs().sum())
            return super().forward(x)

    layers = [LayerSpec(Penalised), LayerSpec(Block), LayerSpec(Penalised)]
    check(Case(lambda: PipelineModule(layers, loss), items), layout)


@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 1), Layout("split", 4), Layout("gpipe", 4, recompute="every")], ids=str
)
def test_parameters_that_only_an_added_loss_trains(layout: Layout) -> None:
    """A router whose choice has no gradient; and a main loss without any, which is fine then."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.linear(x)
            add_loss("router", scores.logsumexp(-1).square().mean())
            return x * (1 + scores.argmax(-1, keepdim=True))

    check(Case(lambda: blocks(Router), items), layout)
    cut_off = Case(lambda: blocks(Router, loss_fn=lambda y, t: functional.mse_loss(y.detach(), t)), items)
    check(cut_off, layout)


def test_an_added_loss_outside_of_an_engine_does_nothing() -> None:
    layer = Experts()
    assert layer(torch.ones(2, WIDTH)).shape == (2, WIDTH)
