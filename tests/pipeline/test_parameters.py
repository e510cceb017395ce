"""Frozen, shared and missing parameters, and where their first values come from: against plain PyTorch."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.batch import Item
from pipeline.build import build_layers
from pipeline.errors import ModelError, StepFailed
from pipeline.links.protocol import LANE_B
from tests.pipeline import running
from tests.pipeline.conftest import Sent
from tests.pipeline.models import sgd
from tests.pipeline.processes import run_processes
from tests.pipeline.reference import Case, Layout, Outcome, Plain, agree, check, check_all, plainly, run, spread, train

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 4


def items(step: int, data_rank: int) -> list[Item]:
    """Micro-batches of random rows, with random targets."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return [Item(*torch.randn(2, n, WIDTH, generator=generator)) for n in (2, 2, 2, 1)]


def words(step: int, data_rank: int) -> list[Item]:
    """Micro-batches of token numbers, with the next ones as targets."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    tokens = [torch.randint(0, 7, (n, 3), generator=generator) for n in (2, 2, 2, 1)]
    return [Item(x, (x + 1) % 7) for x in tokens]


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """A linear layer of each kind of trouble: with a bias, without one, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


# -- frozen --------------------------------------------------------------------------------------------------


def frozen(factory: Callable[[], nn.Module], keep: str | None = None) -> nn.Module:
    """What the factory makes, with nothing to be trained but parameters whose name holds ``keep``."""
    module = factory()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(keep is not None and keep in name)
    return module


FREEZING: dict[str, Callable[[int], str | None]] = {
    "the first layer": lambda layer: None if layer == 0 else "",
    "the first half": lambda layer: None if layer < 3 else "",
    "the middle": lambda layer: None if layer in (2, 3) else "",
    "the last half": lambda layer: None if layer >= 3 else "",
    "all but a middle layer": lambda layer: "" if layer == 3 else None,
    "all but one bias": lambda layer: "up.bias" if layer == 2 else None,
    "weights": lambda layer: "bias",
    "biases": lambda layer: "weight",
    "every other layer": lambda layer: "" if layer % 2 else None,
}


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters(name: str) -> None:
    """They stay what they were, and nothing that is not frozen loses its gradient."""
    layers = [LayerSpec(frozen, Block, FREEZING[name](i)) for i in range(6)]
    check_all(Case(lambda: PipelineModule(layers, functional.mse_loss), items), spread(6))


def test_nothing_is_sent_back_to_frozen_stages(sent: Sent) -> None:
    layers = [LayerSpec(frozen, Block, None if i < 2 else "") for i in range(4)]
    check(Case(lambda: PipelineModule(layers, functional.mse_loss), items), Layout("1f1b", 4))
    assert Counter(lane for lane, _ in sent)[LANE_B] == 2 * 4  # steps x micro-batches, over the last boundary alone


@pytest.mark.parametrize("layers", [[LayerSpec(frozen, Block)] * 4, [nn.Tanh()] * 4], ids=["frozen", "no parameters"])
@pytest.mark.parametrize("partition", ["uniform", "profile"])
def test_nothing_to_train(partition: str, layers: list[Any]) -> None:
    """A clear error before the first step; but such a model can be evaluated."""

    def worker(optimizer: Any) -> float:
        module = PipelineModule(layers, functional.mse_loss)
        engine = initialize(module, config={"partition": partition, "micro_batches": 4}, optimizer=optimizer)
        if optimizer is None:
            return engine.eval_batch(items(0, 0)).item()
        return engine.train_batch(items(0, 0)).item()

    with pytest.raises(ModelError, match="no parameter of the model is trainable; set requires_grad"):
        run_local(worker, 2, sgd)
    losses = run_local(worker, 2, None)
    assert losses[0] == losses[1] > 0


def test_gradients_that_are_set_to_none_between_steps() -> None:
    """As a loop does that was written for plain PyTorch: the engine's gradients are in place again in the next step."""

    def worker(zero: bool) -> list[float]:
        torch.manual_seed(0)
        linear = nn.Linear(WIDTH, WIDTH)
        engine = initialize(PipelineModule([linear], functional.mse_loss), config=Layout().settings(), optimizer=sgd)
        losses = []
        for step in range(3):
            losses.append(engine.train_batch(items(step, 0)).item())
            if zero:
                linear.zero_grad(set_to_none=True)
                engine.optimizer.zero_grad(set_to_none=True)
        return losses

    assert run_local(worker, 1, True) == run_local(worker, 1, False)


class Meddling(nn.Linear):
    """Does something to its weight in the second step, which would be lost on the engine."""

    def __init__(self, what: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.what = what
        self.calls = 0
        self.weight.requires_grad_(what != "thawed")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        if self.calls == 5 and self.what == "gradient":
            self.weight.grad = None
        if self.calls == 5 and self.what == "values":
            self.weight.data = self.weight.data.clone()
        if self.calls == 5 and self.what == "parameter":
            self.weight = nn.Parameter(self.weight.detach().clone())
        if self.calls == 5 and self.what in ("thawed", "frozen"):
            self.weight.requires_grad_(self.what == "thawed")
        return y


MEDDLING = {
    "gradient": "the gradient of 'weight' was replaced",
    "values": "the values of 'weight' were replaced",
    "parameter": "the parameter 'weight' was replaced by another object, which nothing trains",
    "thawed": "the parameter 'weight' was frozen when the engine was made and is trainable now",
    "frozen": "the parameter 'weight' was trainable when the engine was made and is frozen now",
}


@pytest.mark.parametrize("what", MEDDLING)
def test_a_gradient_that_would_be_lost_is_an_error(what: str) -> None:
    """On every rank, and none of them goes on with weights that nobody trains."""

    def worker() -> str:
        layers = [LayerSpec(Block), LayerSpec(Meddling, what), LayerSpec(Block)]
        module = PipelineModule(layers, functional.mse_loss)
        engine = initialize(module, config=Layout("1f1b", 3).settings(), optimizer=sgd)
        engine.train_batch(items(0, 0))
        with pytest.raises(StepFailed, match=MEDDLING[what]) as caught:
            engine.train_batch(items(1, 0))
        return f"{caught.value.rank} {caught.value.layer}"

    assert run_local(worker, 3) == ["1 1 (Meddling)"] * 3


# -- shared --------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Its linear layer is called twice, and its weight is used by hand once more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh()) @ self.linear.weight + x


class OneForTwo(nn.Module):
    """Two linear layers with one weight, and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("kind", [Twice, OneForTwo])
def test_a_parameter_used_twice_in_a_layer(kind: type[nn.Module]) -> None:
    layers = [LayerSpec(kind), LayerSpec(Block), LayerSpec(kind), LayerSpec(Block)]
    layouts = [Layout("1f1b", 1), Layout("gpipe", 2, recompute="every"), Layout("split", 4), Layout("vee", 2, 2)]
    for layout in layouts:
        case = Case(lambda: PipelineModule(layers, functional.mse_loss), items)
        found = run(case, layout)
        expected = plainly(case, layout, {n: t for n, t in found.before.items() if "second.weight" not in n})
        agree(without_aliases(found), without_aliases(expected), str(layout))


def without_aliases(outcome: Outcome) -> Outcome:
    """Names that a plain ``state_dict`` has twice, once."""
    kept = [{n: t for n, t in state.items() if "second.weight" not in n} for state in (outcome.before, outcome.after)]
    return Outcome(kept[0], outcome.losses, outcome.norms, outcome.added, kept[1])


def read_out(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def shifted(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """In the middle: adds a row chosen by the content."""
    return x + embedding(x.detach().argmax(-1))


def tied(*places: int, trainable: bool = True) -> Callable[[], PipelineModule]:
    """Six layers on tokens; the table is used at the first, the last and these places."""

    def table() -> nn.Embedding:
        return nn.Embedding(7, WIDTH).requires_grad_(trainable)

    def model() -> PipelineModule:
        layers: list[Any] = [TiedLayerSpec("table", table), *[LayerSpec(Block)] * 4]
        layers.append(TiedLayerSpec("table", table, forward=read_out))
        for place in places:
            layers[place] = TiedLayerSpec("table", table, forward=shifted)
        return PipelineModule(layers, cross_entropy)

    return model


@pytest.mark.parametrize("places", [(), (3,), (1, 2, 3)], ids=["two places", "three places", "five places"])
def test_a_tied_parameter_gets_the_sum_of_its_uses_once(places: tuple[int, ...]) -> None:
    """On one rank, on two stages of a rank, on several ranks, and on copies of a pipeline; also in the norm."""
    layouts = [*spread(6), Layout("interleaved-1f1b", 1, 3), Layout("interleaved-1f1b", 3, 2)]
    check_all(Case(tied(*places), words), layouts, gradient_clipping=0.5)


def test_a_tied_parameter_may_be_frozen() -> None:
    check_all(Case(tied(3, trainable=False), words), spread(6))


def slower_with_depth(name: str, shape: torch.Size) -> dict[str, Any]:
    return {"lr": 0.1 / (1 + int(name.split(".")[1]))}


@pytest.mark.parametrize("layout", [Layout("1f1b", 1), Layout("1f1b", 3), Layout("vee", 2, 2)], ids=str)
def test_all_uses_of_a_tied_parameter_are_in_the_group_of_the_first(layout: Layout) -> None:
    """Also where groups are made by name: copies on other ranks take the same steps."""

    def plain_groups(groups: Any) -> torch.optim.Optimizer:
        names = [name for name, _ in Plain(tied(3)()).named_parameters()]
        made = [{**g, **slower_with_depth(n, torch.Size())} for g, n in zip(groups, names, strict=True)]
        return torch.optim.SGD(made, momentum=0.9)

    momentum = partial(torch.optim.SGD, momentum=0.9)
    found = running.run(Case(tied(3), words, optimizer=momentum), layout, param_groups=slower_with_depth)
    agree(found, plainly(Case(tied(3), words, optimizer=plain_groups), layout, found.before), str(layout))


def train_tied() -> Outcome:
    torch.set_default_dtype(torch.float64)
    case = Case(tied(3), words)
    return train(initialize(case.model(), config=Layout("1f1b", 3).settings(), optimizer=case.optimizer), case)


def test_a_tied_parameter_between_processes() -> None:
    outcome = run_processes(train_tied, 3)[0]
    agree(outcome, plainly(Case(tied(3), words), Layout("1f1b", 3), outcome.before), "processes")


class Wrapped(nn.Module):
    """A module inside of another one."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.scale


def same_module_twice() -> list[nn.Module]:
    linear = nn.Linear(WIDTH, WIDTH)
    return [linear, nn.Tanh(), linear, nn.Tanh(), linear, nn.Linear(WIDTH, WIDTH)]


def same_child() -> list[nn.Module]:
    linear = nn.Linear(WIDTH, WIDTH)
    return [Wrapped(linear), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Wrapped(linear), linear, nn.Linear(WIDTH, WIDTH)]


def same_parameter() -> list[nn.Module]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    layers[3].weight = layers[5].weight = layers[0].weight
    layers[4].bias = layers[1].bias
    return list(layers)


def same_among_frozen() -> list[nn.Module]:
    layers = same_module_twice()
    layers[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    return layers


@pytest.mark.parametrize("make", [same_module_twice, same_child, same_parameter, same_among_frozen])
def test_ready_modules_that_share(make: Callable[[], list[nn.Module]]) -> None:
    """The same object twice, the same child in two, or one Parameter in several: as in an nn.Sequential of them."""

    def model() -> PipelineModule:
        torch.manual_seed(3)
        return PipelineModule(nn.Sequential(*make()), functional.mse_loss)

    layouts = [*spread(6), Layout("interleaved-1f1b", 1, 3), Layout("1f1b", 6), Layout("split", 1)]
    for layout in layouts:
        if layout.ranks == 1:
            check(Case(model, items), layout)
        else:
            module = model()  # made once, before the ranks: they have it in common
            check(Case(lambda module=module: module, items), layout)  # type: ignore[misc]


# -- missing -------------------------------------------------------------------------------------------------


class OnlyBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_stages_without_parameters() -> None:
    """First, in the middle and last; functions, modules, and modules with nothing but buffers."""
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    layers = [torch.sin, nn.Tanh(), linear, torch.cos, LayerSpec(OnlyBuffers), linear, nn.ReLU(), lambda x: x * 2]
    case = Case(lambda: PipelineModule(layers, functional.mse_loss), items)
    check_all(case, [*spread(8), Layout("1f1b", 8), Layout("1f1b", 4, partition="parameters")])


@pytest.mark.parametrize(
    ("layout", "cuts"),
    [
        (Layout("1f1b", 4), (0, 0, 2, 3, 4)),
        (Layout("gpipe", 4), (0, 2, 2, 3, 4)),
        (Layout("split", 4), (0, 1, 2, 4, 4)),
        (Layout("1f1b", 4), (0, 0, 0, 0, 4)),
        (Layout("split", 3), (0, 4, 4, 4)),
        (Layout("vee", 2, 2), (0, 0, 4, 4, 4)),
        (Layout("interleaved-1f1b", 2, 2), (0, 0, 2, 2, 4)),
        (Layout("1f1b", 6, data_parallel=2), (0, 2, 2, 4)),
    ],
    ids=str,
)
def test_ranks_with_an_empty_stage(layout: Layout, cuts: tuple[int, ...]) -> None:
    check(Case(lambda: PipelineModule([LayerSpec(Block)] * 4, functional.mse_loss), items), layout, partition=cuts)


def test_a_parameter_without_a_use() -> None:
    """Its gradient is 0, and not absent: weight decay moves it alike on every layout."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))
            self.never = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def decaying(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)

    def worker(ranks: int) -> dict[str, Tensor]:
        module = PipelineModule([LayerSpec(Unused)] * 3, functional.mse_loss)
        engine = initialize(module, config=Layout("1f1b", ranks).settings(), optimizer=decaying)
        before = engine.full_state_dict()
        engine.train_batch(items(0, 0))
        after = engine.full_state_dict()
        return {name: after[name] / before[name] for name in before if "never" in name}

    for ranks in (1, 3):
        for ratio in run_local(worker, ranks, ranks)[0].values():
            torch.testing.assert_close(ratio, torch.full((3,), 0.95))


# -- first values --------------------------------------------------------------------------------------------


class Counted(Block):
    """Knows how many of its kind each rank has in memory, and how many it has made."""

    alive: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()
    most: ClassVar[Counter[str]] = Counter()
    made: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.rank = threading.current_thread().name
        Counted.alive.add(self)
        Counted.made[self.rank] += 1
        mine = [other for other in list(Counted.alive) if other.rank == self.rank and other.in_memory()]
        Counted.most[self.rank] = max(Counted.most[self.rank], len(mine))

    def in_memory(self) -> bool:
        return self.up.weight.untyped_storage().nbytes() > 0


def first_values(layout: Layout, seed: int = 0) -> dict[str, Tensor]:
    def worker() -> dict[str, Tensor]:
        layers = [TiedLayerSpec("t", nn.Linear, 4, 4), *[LayerSpec(Counted)] * 6, TiedLayerSpec("t", nn.Linear, 4, 4)]
        module = PipelineModule(layers, functional.mse_loss)
        engine = initialize(module, config=layout.settings(seed=seed), optimizer=sgd)
        if layout.partition == "profile":
            engine.eval_batch(items(0, 0))
        return engine.full_state_dict()

    torch.manual_seed(layout.ranks)  # the state of the user's generator has no part in it
    return run_local(worker, layout.ranks)[0]


def test_first_values_depend_on_the_seed_alone() -> None:
    layouts = [
        Layout("1f1b", 2),
        Layout("gpipe", 3, partition=(1, 6)),
        Layout("1f1b", 4, partition=(0, 0, 5, 8, 8)),
        Layout("interleaved-1f1b", 2, 2),
        Layout("vee", 2, 2),
        Layout("1f1b", 4, data_parallel=2),
        Layout("1f1b", 3, partition="parameters"),
        Layout("1f1b", 3, partition="profile"),
        Layout("1f1b", 1, partition="profile"),
    ]
    alone = first_values(Layout("1f1b", 1))
    for layout in layouts:
        other = first_values(layout)
        assert other.keys() == alone.keys(), layout
        assert all(other[name].equal(tensor) for name, tensor in alone.items()), layout
    assert not alone["layers.1.up.weight"].equal(alone["layers.2.up.weight"])
    assert not alone["layers.1.up.weight"].equal(first_values(Layout("1f1b", 1), seed=1)["layers.1.up.weight"])


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout("1f1b", 2), 3),
        (Layout("gpipe", 3, partition=(1, 6)), 5),
        (Layout("1f1b", 4, partition=(0, 2, 4, 5, 8)), 2),
        (Layout("vee", 4, 2), 2),
        (Layout("1f1b", 8, data_parallel=2), 2),
        (Layout("1f1b", 4, partition="parameters"), 3),
        (Layout("1f1b", 4, partition="profile"), 6),
    ],
    ids=str,
)
def test_nobody_builds_the_whole_model(layout: Layout, most: int) -> None:
    """A rank builds its own layers, and before that one at a time where they are counted or timed."""
    gc.collect()
    Counted.alive, Counted.most, Counted.made = weakref.WeakSet(), Counter(), Counter()
    in_advance: list[int] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        in_advance.append(Counted.most[threading.current_thread().name])
        return build_layers(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.runner.build_layers", noting)
        first_values(layout)
    assert max(in_advance) <= 1
    assert max(Counted.most.values()) <= most
    searches = layout.ranks if layout.partition in ("parameters", "profile") else 0
    assert Counted.made.total() == 6 * (layout.data_parallel + searches)
