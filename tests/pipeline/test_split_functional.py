"""Functional operators on weights are split too, wherever user code calls them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.gradients import FlatLayer, WeightGradQueue, split
from tests.pipeline.splitting import check, default_dtype, waiting
from tests.pipeline.ways import PRECISIONS, WAYS, Way, cells

Body = Callable[[Mapping[str, Tensor], Tensor], Tensor]


class Layer(nn.Module):
    """Weights of given shapes, and what to do with them, or with a view of them."""

    def __init__(self, body: Body, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.view: Callable[[Tensor], Tensor] = lambda w: w
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body({**dict(self.named_parameters()), "w": self.view(self.w)}, x)


def sliced(layer: nn.Module) -> nn.Module:
    """The layer with its weight cut out of the middle of a larger parameter."""
    rows, *others = layer.w.shape
    layer.w, layer.view = nn.Parameter(torch.randn(rows + 2, *others)), lambda w: w[1:-1]
    return layer


def transposed(layer: nn.Module) -> nn.Module:
    """The layer with its weight lying the other way round in the parameter."""
    rows, columns, *others = layer.w.shape
    layer.w, layer.view = nn.Parameter(torch.randn(columns, rows, *others)), lambda w: w.transpose(0, 1)
    return layer


VIEWS = {"slice of a parameter": Way(sliced), "transposed parameter": Way(transposed)}
COLUMNS = WAYS | VIEWS


MATRIX = (4, 4)
X = (2, 3, 4)

CALLS: dict[str, tuple[Body, tuple[int, ...], tuple[int, ...], int]] = {
    # what is called with weights w, b and x; the shapes of w and x; how many weight gradients wait after I
    "linear": (lambda p, x: functional.linear(x, p["w"], p["b"]), MATRIX, X, 1),
    "linear, named": (lambda p, x: functional.linear(input=x, weight=p["w"]), MATRIX, X, 1),
    "linear, other bias": (lambda p, x: functional.linear(x, p["w"], p["b"] * 2), MATRIX, X, 1),
    "matmul": (lambda p, x: torch.matmul(x, p["w"]), MATRIX, X, 1),
    "matmul, method": (lambda p, x: x.matmul(p["w"].transpose(0, 1)), MATRIX, X, 1),
    "@ transposed": (lambda p, x: x @ p["w"].t(), MATRIX, X, 1),
    "@ T": (lambda p, x: x @ p["w"].T, (5, 4), X, 1),
    "@ from the left": (lambda p, x: p["w"] @ x.transpose(1, 2), (5, 4), X, 1),
    "@ a vector": (lambda p, x: x[0, 0] @ p["w"], MATRIX, X, 1),
    "@ a vector behind": (lambda p, x: p["w"] @ x[0, 0], (5, 4), X, 1),
    "mm": (lambda p, x: torch.mm(x[0], p["w"]), MATRIX, X, 1),
    "addmm": (lambda p, x: torch.addmm(p["b"], x[0], p["w"]), MATRIX, X, 1),
    "addmm of a matrix": (lambda p, x: torch.addmm(x[0], x[1], p["w"]), MATRIX, X, 1),
    "addmm, scaled": (lambda p, x: torch.addmm(p["b"], x[0], p["w"], alpha=2), MATRIX, X, 0),
    "addmm, method": (lambda p, x: p["b"].addmm(x[0], p["w"]), MATRIX, X, 1),
    "slice": (lambda p, x: x @ p["w"][2:, 1:], (6, 5), X, 1),
    "chunks": (lambda p, x: sum(x @ part.t() for part in p["w"].chunk(3)), (12, 4), X, 3),
    "view": (lambda p, x: x @ p["w"].view(4, 6), (2, 2, 6), X, 1),
    "expanded": (lambda p, x: x @ p["w"].expand(4, 5), (1, 5), X, 0),
    "overlapping": (lambda p, x: x @ p["w"].view(-1).unfold(0, 4, 1), (2, 4), (2, 3, 5), 0),
    "batched weight": (lambda p, x: x @ p["w"], (2, 4, 5), X, 0),
    "einsum": (lambda p, x: torch.einsum("bti,io->bto", x, p["w"]), MATRIX, X, 1),
    "einsum, weight first": (lambda p, x: torch.einsum("oi,bti->otb", [p["w"], x]), MATRIX, X, 1),
    "einsum into heads": (lambda p, x: torch.einsum("bti,ihd->bhtd", x, p["w"]), (4, 2, 3), X, 1),
    "einsum out of heads": (lambda p, x: torch.einsum("bthd,hdo->bto", heads(x), p["w"]), (2, 2, 5), X, 1),
    "einsum by row": (lambda p, x: torch.einsum("bti,bio->bto", x, p["w"]), (2, 4, 5), X, 0),
    "einsum with a sum": (lambda p, x: torch.einsum("bti,io->bo", x, p["w"]), MATRIX, X, 0),
    "einsum without arrow": (lambda p, x: torch.einsum("bti,io", x, p["w"]), MATRIX, X, 0),
    "einsum, copied": (lambda p, x: torch.einsum("bthd,hod->bto", heads(x), p["w"]), (2, 5, 2), X, 0),
    "embedding": (lambda p, x: functional.embedding(index(x), p["w"]), (7, 5), X, 1),
    "embedding, padded": (lambda p, x: functional.embedding(index(x), p["w"], padding_idx=-1), (7, 5), X, 1),
    "embedding by frequency": (
        lambda p, x: functional.embedding(index(x), p["w"], scale_grad_by_freq=True), (7, 5), X, 0,
    ),
    "conv1d": (lambda p, x: functional.conv1d(x, p["w"], p["b"], padding=1), (4, 3, 3), X, 1),
    "conv2d": (lambda p, x: functional.conv2d(x, p["w"], stride=(2, 1), padding="valid"), (4, 2, 2, 2), X, 1),
    "conv3d": (
        lambda p, x: functional.conv3d(x, p["w"], groups=2, bias=p["b"]), (4, 1, 1, 2, 2), (1, 2, 2, 3, 4), 1,
    ),
    "conv1d, other bias": (lambda p, x: functional.conv1d(x, p["w"], p["b"][:3]), (3, 3, 2), X, 1),
    "weight and weight": (lambda p, x: x @ (p["w"] @ p["w"].t()), MATRIX, X, 0),
    "weight by a number": (lambda p, x: x @ (2 * p["w"]), MATRIX, X, 0),
    "loss on the weight": (lambda p, x: x @ p["w"] + p["w"].square().mean(), MATRIX, X, 0),
    "twice": (lambda p, x: torch.tanh(x @ p["w"]) @ p["w"].t(), MATRIX, X, 2),
    "into a buffer": (
        lambda p, x: torch.matmul(x.detach(), p["w"].detach(), out=torch.empty(X)) + p["w"].mean(), MATRIX, X, 0,
    ),
    "checkpointed": (lambda p, x: checkpoint(lambda v: (v @ p["w"]).sin(), x, use_reentrant=False), MATRIX, X, 1),
    "re-entering": (lambda p, x: checkpoint(lambda v: (v @ p["w"]).sin(), x, use_reentrant=True), MATRIX, X, 1),
    "asked for in forward": (
        lambda p, x: x @ p["w"] + torch.autograd.grad((x @ p["w"]).sin().sum(), x, create_graph=True)[0], MATRIX, X, 0,
    ),
}  # fmt: skip


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, 2))


def index(x: Tensor) -> Tensor:
    return x.detach().abs().mul(10).long() % 7


IMPOSSIBLE = {
    ("view", "transposed parameter"): "it would have to be copied, which view refuses",
    ("overlapping", "transposed parameter"): "it would have to be copied, which view refuses",
    ("asked for in forward", "input without gradient"): "there is nothing to ask for",
    ("asked for in forward", "checkpointed by re-entering"): "the first forward is without a graph",
}
WAITS_OTHERWISE = {
    # Their dimensions join into a matrix in one order only.
    ("einsum into heads", "transposed parameter"): 0,
    ("einsum out of heads", "transposed parameter"): 0,
    ("einsum, copied", "transposed parameter"): 1,
}


def made(name: str, way: str = "plain", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor], int]:
    body, weight, x, waits = CALLS[name]
    torch.manual_seed(1)
    with default_dtype(dtype):
        layer = COLUMNS[way].wrap(Layer(body, w=weight, b=(4,)))
        return layer, [torch.randn(x) for _ in range(3)], waits


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "way", "precision"), cells(CALLS, COLUMNS, IMPOSSIBLE))
def test_gradients_equal_autograd(name: str, way: str, precision: str) -> None:
    dtype, autocast, tolerance = PRECISIONS[precision]
    _, input_grad, recompute = COLUMNS[way]
    layer, batches, _ = made(name, way, dtype)
    with default_dtype(dtype):
        check(layer, batches, tolerance=tolerance, input_grad=input_grad, autocast=autocast, recompute=recompute)


@pytest.mark.parametrize(("name", "way"), [cell[:2] for cell in cells(CALLS, ["plain", *VIEWS], IMPOSSIBLE)[::2]])
def test_what_waits_for_w(name: str, way: str) -> None:
    layer, batches, waits = made(name, way)
    with default_dtype(torch.float64):
        assert waiting(layer, batches[0]) == WAITS_OTHERWISE.get((name, way), waits)


class Tied(nn.Module):
    """A table used by its module and, transposed, by a functional operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.project(self.table(index(x[..., 0]))), self.table.weight) + x.sum()


def test_one_weight_used_by_a_module_and_a_functional() -> None:
    with default_dtype(torch.float64):
        torch.manual_seed(1)
        check(Tied(), [torch.randn(X) for _ in range(3)])
        assert waiting(Tied(), torch.randn(X)) == 3


def test_weights_are_ordinary_parameters_outside_of_user_code() -> None:
    module = Tied()
    binding, seen = split(module, FlatLayer(module)), []
    module.project.register_forward_hook(lambda *a: seen.append(isinstance(module.table.weight, nn.Parameter)))
    with binding.forward(WeightGradQueue()):
        module(torch.randn(X))
        pickled = pickle.loads(pickle.dumps(module.table.weight))
        copied = copy.deepcopy(module.table.weight)
    with pytest.raises(IndexError), binding.forward(WeightGradQueue()):
        module(torch.tensor(1.0))
    assert seen == [True]
    assert type(module.table.weight) is type(pickled) is nn.Parameter
    assert isinstance(copied, nn.Parameter)
    assert torch.equal(pickled, module.table.weight)
    assert torch.equal(copied, module.table.weight)


def test_the_report_tells_what_fell_back_and_how_much_it_is() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.project = nn.Linear(8, 6)
            self.elsewhere = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.attention(x, x, x, need_weights=False)
            return self.project(self.elsewhere(x) * self.elsewhere.weight.mean())

    module = Both()
    binding, queue = split(module, FlatLayer(module)), WeightGradQueue()
    with binding.forward(queue):
        y = module(torch.randn(2, 3, 8))
    with binding.backward(queue, inline=False):
        y.sum().backward()
    report = binding.report()
    assert report.split == ("project.weight",)
    assert {entry.name: (entry.operators, entry.elements) for entry in report.fallen_back} == {
        "attention.in_proj_weight": (("multi_head_attention_forward",), 192),
        "attention.out_proj.weight": (("multi_head_attention_forward",), 64),
        "elsewhere.weight": (("mean",), 64),
    }
    assert report.share == pytest.approx(320 / (320 + 48))
