"""What crosses a stage boundary arrives as it was, and so does its gradient: held against plain PyTorch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import register_dataclass
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import StepFailed
from pipeline.links.protocol import LANE_B, LANE_F
from tests.pipeline.conftest import Sent
from tests.pipeline.processes import run_processes
from tests.pipeline.reference import Case, Layout, Outcome, agree, check, check_all, plainly, run, spread, train

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 4


def items(step: int, data_rank: int, sizes: tuple[int, ...] = (2, 2, 2, 1)) -> list[Item]:
    """Micro-batches of random rows, with random targets."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return [Item(torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)) for n in sizes]


def stack(*layers: Any) -> Case:
    """The layers between two linear ones, so that something is trained on both sides of every boundary."""
    specs = [layer if isinstance(layer, LayerSpec) else LayerSpec(layer) for layer in layers]
    end = LayerSpec(nn.Linear, WIDTH, WIDTH)
    return Case(lambda: PipelineModule([end, *specs, end], functional.mse_loss), items)


class Function(nn.Module):
    """A function as a layer, with weights of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.function(x, self.weight)


def layer(function: Callable[[Any, Tensor], Any]) -> LayerSpec:
    """``function(x, weight)`` as a layer."""
    return LayerSpec(Function, function)


# -- integers ------------------------------------------------------------------------------------------------


class Indices(nn.Module):
    """Makes indices of what it gets, and hands on both."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (x * 10).long() % 7


class LookUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, indices = pair
        return x + self.table(indices).sum(1)


def test_indices_made_on_one_stage_are_looked_up_on_another() -> None:
    check_all(stack(Indices, LookUp), spread(4))


def test_integers_have_no_gradient_slot(sent: Sent) -> None:
    model = [LayerSpec(Indices), LayerSpec(LookUp)]  # the first has no weights: nothing that it gives needs a gradient
    check(Case(lambda: PipelineModule(model, functional.mse_loss), items), Layout("1f1b", 2))
    assert Counter(sent)[LANE_F, torch.int64] == 2 * 4
    assert not [lane for lane, _ in sent if lane == LANE_B]
    sent.clear()
    check(stack(Indices, LookUp), Layout("1f1b", 2))
    assert {dtype for lane, dtype in sent if lane == LANE_B} == {torch.float64}


class Witness(nn.Module):
    """Notes what it sees."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.linear(x)


@pytest.mark.parametrize("partition", ["uniform", "parameters", "profile"])
def test_layers_never_see_made_up_data(partition: str) -> None:
    """What the first layer sees are micro-batches, each once but for the one that the layers are timed on."""
    seen: list[Tensor] = []
    layers = [LayerSpec(Witness, seen), *[LayerSpec(nn.Linear, WIDTH, WIDTH)] * 3]

    def worker() -> None:
        module = PipelineModule(layers, functional.mse_loss)
        engine = initialize(module, config={"partition": partition, "micro_batches": 4}, optimizer=torch.optim.SGD)
        for step in range(2):
            engine.train_batch(items(step, 0))

    run_local(worker, 2)
    real = [item.inputs for step in range(2) for item in items(step, 0)]
    times = Counter(next(i for i, x in enumerate(real) if x.equal(found)) for found in seen)
    assert [times[number] for number in range(1, 8)] == [1] * 7
    assert times[0] == 1 or partition == "profile"


# -- structures ----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


STRUCTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda x, w: {"b": x * w, "a": x.sin()},
    "ordered dict": lambda x, w: OrderedDict(z=x * w, y=x),
    "nested": lambda x, w: ((x * w, [x.exp(), {"deep": x}]), (x,)),
    "named tuple": lambda x, w: Pair(x * w, Pair(None, x)),
    "dataclass": lambda x, w: Known(x * w, [x]),
    "none": lambda x, w: (None, x * w, None),
    "numbers": lambda x, w: (x * w, 3, 0.5, "mode", True),
    "0-d": lambda x, w: (x * w, (x * w).sum(), torch.tensor(2.0)),
    "complex": lambda x, w: (x, torch.complex(x * w, x.cos())),
    "only complex": lambda x, w: torch.complex(x * w, x),
    "conjugate": lambda x, w: (torch.complex(x * w, x).conj(), torch.complex(x, x * w).conj().imag),
    "bool mask": lambda x, w: (x * w, x > 0),
    "every type": lambda x, w: (x * w, x.int(), x.to(torch.int8), x.half(), (x * w).float(), x.bfloat16()),
    "no rows": lambda x, w: (x * w, x[:0] * w),
    "the same twice": lambda x, w: [y := x * w, y],
    "float32 beside": lambda x, w: {"half": (x * w).float(), "whole": x},
}


def tell(value: Any) -> str:
    """The whole structure in words: types, shapes and constants."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Known):
        return f"Known({tell(value.first)}, {tell(value.second)})"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{k}: {tell(v)}' for k, v in value.items())})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(tell, value))})"
    return repr(value)


def opened(value: Any, weight: Tensor) -> Tensor:
    """One tensor to which every leaf that can have a gradient contributes, each in its own measure."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    total = max(tensors, key=lambda t: t.numel()).abs() * weight
    for number, leaf in enumerate(tensors, start=1):
        parts = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        total = total + number * parts.to(total.dtype).sin().sum() / (leaf.numel() or 1)
    return total


def structured(name: str, made: set[str], seen: set[str]) -> Case:
    """A model that makes a structure on one layer, hands it on through another, and uses it on a third."""

    def making(x: Tensor, weight: Tensor) -> Any:
        value = STRUCTURES[name](x, weight)
        made.add(tell(value))
        return value

    def using(value: Any, weight: Tensor) -> Tensor:
        seen.add(tell(value))
        return opened(value, weight)

    return stack(layer(making), layer(lambda value, weight: value), layer(using))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_arrives_as_it_was(name: str) -> None:
    made: set[str] = set()
    seen: set[str] = set()
    layouts = [Layout("1f1b", 1), Layout("1f1b", 5), Layout("split", 4, recompute="every"), Layout("vee", 2, 2)]
    check_all(structured(name, made, seen), layouts)
    assert seen == made


@dataclass
class Known:
    """A dataclass that torch knows."""

    first: Any
    second: Any


register_dataclass(Known)


@dataclass
class Unknown:
    inside: Any


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


CLOSED = [Unknown, Slotted, lambda x: Unknown([{"deep": x}]), lambda x: {x}]


@pytest.mark.parametrize("make", CLOSED)
@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 1), Layout("1f1b", 4), Layout("gpipe", 1, recompute="every")], ids=str
)
def test_an_object_that_would_hide_a_gradient_is_refused(make: Any, layout: Layout) -> None:
    case = stack(layer(lambda x, w: make(x * w)), layer(lambda value, w: w))
    with pytest.raises(StepFailed, match=r"in layer 1 .*in which there are tensors that need a gradient"):
        run(case, layout)


def train_all_structures() -> list[Outcome]:
    torch.set_default_dtype(torch.float64)
    layout = Layout("1f1b", 3)
    cases = [structured(name, set(), set()) for name in STRUCTURES]
    return [train(initialize(c.model(), config=layout.settings(), optimizer=c.optimizer), c) for c in cases]


def test_structures_arrive_between_processes() -> None:
    """Where messages are bytes: a conjugate is one only by a mark beside its memory, and so on."""
    outcomes = run_processes(train_all_structures, 3)[0]
    for name, outcome in zip(STRUCTURES, outcomes, strict=True):
        case = structured(name, set(), set())
        agree(outcome, plainly(case, Layout("1f1b", 3), outcome.before), name)


def test_the_same_tensor_twice_stays_one(sent: Sent) -> None:
    """It crosses once, and what happens to it in place happens to both, as in one process."""

    def change(pair: list[Tensor], weight: Tensor) -> Tensor:
        first, second = pair
        return first.mul_(2.0) * weight + second

    case = stack(layer(STRUCTURES["the same twice"]), layer(change))
    check_all(case, spread(4))
    sent.clear()
    check(case, Layout("1f1b", 2, partition=(2,)))
    assert Counter(lane for lane, _ in sent if lane in (LANE_F, LANE_B)) == {LANE_F: 8, LANE_B: 8}


# -- gradients -----------------------------------------------------------------------------------------------


def test_a_tensor_that_only_passes_through_takes_its_gradient_all_the_way_back() -> None:
    def aside(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh() * weight, x

    def on(pair: tuple[Tensor, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        return pair[0].tanh() * weight, pair[1]

    def together(pair: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
        return pair[0] * pair[1] * weight

    case = stack(layer(aside), layer(on), layer(on), layer(on), layer(together))
    check_all(case, [Layout("1f1b", 7), Layout("gpipe", 7), Layout("split", 7), Layout("interleaved-1f1b", 3, 2)])


def cut_off(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Something beside x that has a gradient only where x begins with a positive number."""
    side = x * weight
    return x, side if x[0, 0] > 0 else side.detach()


def ignored(pair: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    """Uses the second of a pair only where it begins with a positive number."""
    main, side = pair
    return main * weight + side if side[0, 0] > 0 else main * weight


@pytest.mark.parametrize("steps", [1, 6])
def test_a_gradient_that_some_micro_batches_do_not_have_is_zero(steps: int) -> None:
    """Whether a tensor is cut off by who makes it or left alone by who gets it: nobody waits, nothing is lost."""
    model = stack(layer(cut_off), layer(ignored)).model
    check_all(Case(model, lambda step, rank: items(step + 7, rank, (1, 2, 1, 1)), steps), spread(4))


def test_a_gradient_may_be_needed_first_in_a_later_step() -> None:
    """Where earlier inputs of the same shapes needed none: the step is run again, and leaves no trace of the first."""

    def signed(step: int, rank: int) -> list[Item]:
        sign = -1 if step < 2 else 1
        return [Item(torch.cat([sign * x[:, :1].abs(), x[:, 1:]], 1), y) for x, y in items(step, rank, (2, 2))]

    def now_and_then(x: Tensor, weight: Tensor) -> Tensor:
        x.mul_(3.0)  # the user's data, changed in place: a second time it would count double
        return x * weight if x[0, 0] > 0 else (x * weight).detach()

    linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
    layers = [layer(now_and_then), linear, LayerSpec(nn.BatchNorm1d, WIDTH), linear]
    case = Case(lambda: PipelineModule(layers, functional.mse_loss), signed, steps=4)
    check_all(case, [layout for layout in spread(4, 2) if layout.data_parallel == 1])  # copies have statistics each


class Positive(nn.Module):
    """The rows that begin with a positive number, and how many they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        rows = x[x[:, 0] > 0]
        return rows * self.weight, len(rows)


class DeclaredPositive(Positive):
    data_dependent_shapes = True


@pytest.mark.parametrize("kind", [Positive, DeclaredPositive])
def test_shapes_that_depend_on_values(kind: type[nn.Module]) -> None:
    """Declared or not: between micro-batches of a step, between steps, down to no rows at all."""
    fill = layer(lambda pair, w: pair[0].sum(0) * w / (1 + pair[1]))
    layers = [LayerSpec(kind), layer(lambda pair, w: (pair[0] * w, pair[1])), fill, LayerSpec(nn.Linear, WIDTH, WIDTH)]

    def model() -> PipelineModule:
        return PipelineModule(layers, lambda y, t: functional.mse_loss(y, t[0]))

    check_all(Case(model, lambda step, rank: items(step, rank, (3, 3, 3, 3)), steps=4), spread(4))


# -- memory --------------------------------------------------------------------------------------------------

Maker, User = Callable[[Tensor, Tensor], Any], Callable[[Any, Tensor], Tensor]

VIEWS: dict[str, tuple[Maker, User]] = {
    "transpose": (lambda x, w: (x * w).t(), lambda y, w: y.t() * w),
    "chunks": (lambda x, w: (x * w).chunk(2, dim=1), lambda pair, w: torch.cat([pair[1], pair[0]], 1) * w),
    "slice": (lambda x, w: (x * w)[:, ::2], lambda y, w: torch.cat([y, y], 1) * w),
    "expanded": (lambda x, w: (x * w).mean(1, keepdim=True).expand(-1, WIDTH), lambda y, w: y * w),
    "its own input": (lambda x, w: x, lambda y, w: y * w),
    "part of its input": (lambda x, w: x[:, 1:], lambda y, w: functional.pad(y, (1, 0)) * w),
    "its weight": (lambda x, w: (x, w[:2]), lambda pair, w: pair[0] * w + pair[1].sum()),
    "in place": (lambda x, w: x.mul_(w), lambda y, w: y.add_(1.0).relu_() * w),
    "in place on a view": (lambda x, w: x.t().mul_(2.0).t() * w, lambda y, w: y[:, 0].add_(1.0)[:, None] * w + y),
    "in place on a part": (lambda x, w: (x[:, :2].mul_(2.0), x)[1] * w, lambda y, w: (y[:, 1].zero_(), y)[1] * w),
}

PLACES = [
    Layout("1f1b", 1),
    Layout("1f1b", 5, recompute="every"),
    Layout("gpipe", 2),
    Layout("split", 5),
    Layout("split", 2, recompute="every:2"),
    Layout("vee", 2, 2, recompute="every:3"),
    Layout("interleaved-1f1b", 1, 2),
]


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_changes_in_place(name: str) -> None:
    first, second = VIEWS[name]
    check_all(stack(layer(first), layer(second), layer(lambda x, w: x.cos() * w)), PLACES)


@pytest.mark.parametrize("name", VIEWS)
def test_views_while_layers_are_timed(name: str) -> None:
    """Each layer is freed when it has been timed; what it gave lives on."""
    first, second = VIEWS[name]
    case = stack(layer(first), layer(second), layer(lambda x, w: x.cos() * w))

    def worker() -> float:
        engine = initialize(case.model(), config=Layout("1f1b", 2, partition="profile").settings(profile_runs=1))
        return engine.eval_batch(items(0, 0)).item()

    uniform = run(Case(case.model, items, steps=1), Layout("1f1b", 2)).losses[0]
    assert run_local(worker, 2) == [pytest.approx(uniform, rel=1e-12)] * 2


def test_the_users_data_is_never_changed() -> None:
    """By a layer, a loss, the timing of layers, or a step: what is trained on is what was given."""
    given = items(0, 0)
    model = [layer(lambda x, w: x.mul_(2.0) * w), *[LayerSpec(nn.Linear, WIDTH, WIDTH)] * 3]

    def worker() -> list[float]:
        module = PipelineModule(model, lambda y, t: functional.mse_loss(y, t.mul_(2.0)))
        config = {"partition": "profile", "micro_batches": 4, "device": "cpu"}
        engine = initialize(module, config=config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0))
        return [engine.train_batch(given).item(), engine.eval_batch(given).item(), engine.train_batch(given).item()]

    first, *others = run_local(worker, 2)[0]
    assert others == [first, first]
    for mine, fresh in zip(given, items(0, 0), strict=True):
        assert mine.inputs.equal(fresh.inputs)
        assert mine.targets.equal(fresh.targets)


class Counting(nn.Module):
    """Hands on memory of its own that it changes at the next micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.linear(x), self.count


def test_memory_that_a_layer_uses_again() -> None:
    case = stack(Counting, layer(lambda pair, w: pair[0] * w * pair[1]), layer(lambda x, w: x * w))
    check_all(case, [Layout("gpipe", 5), Layout("gpipe", 1), Layout("vee", 2, 2), Layout("interleaved-1f1b", 1, 4)])


class Powers(nn.Module):
    """Its output depends on a buffer that each forward changes, in place or by another in its stead."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("scale", torch.ones(1))
        self.norm = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.scale = self.scale * 1.5
        else:
            self.scale.mul_(1.5)
        return self.norm(x) * self.scale.clone()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_layer_that_remembers_is_recomputed_as_it_ran(replaces: bool) -> None:
    """From the buffers that it had then: with those it has since, its gradients would be of another function."""
    powers = LayerSpec(Powers, replaces)
    layouts = [Layout("gpipe", 5), Layout("gpipe", 5, recompute="every"), Layout("1f1b", 1, recompute="every:2")]
    check_all(stack(powers, layer(lambda x, w: x.tanh() * w), powers), layouts)


@pytest.mark.parametrize("name", ["transpose", "chunks", "expanded"])
def test_the_memory_order_of_a_view_does_not_change_a_bit(name: str) -> None:
    """Sums depend on the order of memory: it is the same whether a view crosses ranks or not."""
    first, second = VIEWS[name]

    def wide(step: int, rank: int) -> list[Item]:
        generator = torch.Generator().manual_seed(step)
        return [Item(torch.randn(301, WIDTH, generator=generator), None) for _ in range(2)]

    def summed(y: Any, w: Tensor) -> Any:
        leaves = [leaf * leaf.float().mean(0) * leaf.float().sum() for leaf in tree_leaves(y)]
        return leaves[0] if isinstance(y, Tensor) else tuple(leaves)

    def model() -> PipelineModule:
        layers = [layer(lambda x, w: x.float() * w.float()), layer(lambda x, w: first(x, w.float())), layer(summed)]
        layers += [layer(lambda y, w: second(y, w.float())), LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float32)]
        return PipelineModule(layers, lambda x, _: (x**2).mean())

    alone, *others = [run(Case(model, wide), Layout("1f1b", ranks, 1, 2)) for ranks in (1, 2, 5)]
    for outcome in others:
        assert outcome.losses == alone.losses
        assert all(outcome.after[name].equal(tensor) for name, tensor in alone.after.items())


# -- hooks ---------------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Hooks on its input, its output and its child, which count how often they fire, and change what passes."""

    def __init__(self, fired: Counter[str]) -> None:
        super().__init__()
        self.fired = fired
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_pre_hook(lambda module, args: self._note("before", None))
        self.linear.register_forward_hook(lambda module, args, output: self._note("after", output * 2))
        self.linear.register_full_backward_hook(lambda module, into, out: self._note("backward", (into[0] * 3,)))
        self.register_forward_hook(lambda module, args, output: self._note("layer", None))

    def _note(self, what: str, result: Any) -> Any:
        self.fired[what] += 1
        return result

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: self._note("input", gradient * 0.5))
        y = self.linear(x)
        y.register_hook(lambda gradient: self._note("output", gradient + 1.0))
        return y


@pytest.mark.parametrize("layout", spread(3), ids=str)
def test_hooks_fire_once_a_micro_batch(layout: Layout) -> None:
    """And once more where a layer is recomputed, as its forward does; they never pile up over steps."""
    fired: Counter[str] = Counter()
    case = stack(LayerSpec(Hooked, fired))
    outcome = run(case, layout)
    once = 2 * 4 * layout.data_parallel
    forwards = 2 * once if layout.recompute == "every" else once
    assert fired == {
        **dict.fromkeys(("before", "after", "layer"), forwards),
        **dict.fromkeys(("backward", "input", "output"), once),
    }
    agree(outcome, plainly(case, layout, outcome.before), str(layout))
