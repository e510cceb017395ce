"""Modules whose backward is split give autograd's gradients, whichever way a layer uses them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline.gradients import FlatLayer, split, unsplit
from tests.pipeline.splitting import check, default_dtype, splitting, waiting
from tests.pipeline.ways import PRECISIONS, WAYS, cells


class Attention(nn.Module):
    """PyTorch's own attention, which hands its weights to one function that does everything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class First(nn.Module):
    """The first result of a module that has several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(7, shape)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    # module, input of a micro-batch, how many weight gradients wait after I
    "linear": (lambda: nn.Linear(6, 5), floats(3, 4, 6), 1),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), floats(4, 6), 1),
    "linear of a vector": (lambda: nn.Linear(6, 5), floats(6), 1),
    "embedding": (lambda: nn.Embedding(7, 5), tokens(3, 4), 1),
    "embedding of one token": (lambda: nn.Embedding(7, 5), tokens(), 1),
    "embedding with padding": (lambda: nn.Embedding(7, 5, padding_idx=-5), tokens(3, 4), 1),
    "embedding by frequency": (lambda: nn.Embedding(7, 5, scale_grad_by_freq=True), tokens(9), 0),
    "sparse embedding": (lambda: nn.Embedding(7, 5, sparse=True), tokens(9), 0),
    "embedding of bounded norm": (lambda: nn.Embedding(7, 5, max_norm=0.5), tokens(9), 0),
    "convolution 1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), floats(2, 3, 8), 1),
    "convolution 2d": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=2), floats(2, 4, 7, 6), 1),
    "convolution 3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), floats(2, 2, 3, 4, 3), 1),
    "convolution of one sample": (lambda: nn.Conv2d(2, 3, 3), floats(2, 5, 5), 1),
    "convolution, same": (lambda: nn.Conv1d(3, 4, 4, padding="same", dilation=3), floats(2, 3, 8), 1),
    "convolution, valid": (lambda: nn.Conv1d(3, 4, 4, padding="valid"), floats(2, 3, 8), 1),
    "convolution, circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
        floats(2, 2, 5, 6),
        1,
    ),
    "convolution transposed": (lambda: nn.ConvTranspose1d(3, 4, 3), floats(2, 3, 8), 0),
    "attention": (Attention, floats(2, 3, 8), 0),
    "recurrent": (lambda: First(nn.LSTM(4, 3, num_layers=2)), floats(5, 2, 4), 0),
    "complex": (lambda: ComplexLinear(), floats(3, 4), 0),
    "norm": (lambda: nn.LayerNorm(6), floats(3, 6), 0),
}


class ComplexLinear(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(torch.complex128)).abs()


IMPOSSIBLE = {
    ("embedding of bounded norm", "used elsewhere"): "a forward changes the table, which the other use had saved",
    ("recurrent", "autocast"): "not every processor has torch's recurrent layers in bfloat16",
}


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor], int]:
    torch.manual_seed(1)
    with default_dtype(dtype):
        make, sample, waits = MODULES[name]
        return make(), [sample() for _ in range(3)], waits


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "way", "precision"), cells(MODULES, WAYS, IMPOSSIBLE))
def test_gradients_equal_autograd(name: str, way: str, precision: str) -> None:
    dtype, autocast, tolerance = PRECISIONS[precision]
    wrap, input_grad, recompute = WAYS[way]
    module, batches, _ = made(name, dtype)
    check(wrap(module), batches, tolerance=tolerance, input_grad=input_grad, autocast=autocast, recompute=recompute)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", MODULES)
def test_what_waits_for_w(name: str) -> None:
    module, batches, waits = made(name)
    assert waiting(module, batches[0]) == waits


def test_a_frozen_weight_queues_nothing() -> None:
    module = nn.Linear(3, 3)
    module.weight.requires_grad_(False)
    assert waiting(module, torch.randn(2, 3)) == 0


def test_autocast_keeps_the_products_of_its_casts_in_full_precision() -> None:
    torch.manual_seed(1)
    module, x = nn.Linear(64, 3, bias=False), torch.randn(512, 64)
    half = splitting(copy.deepcopy(module), [x], inline=True, autocast=True).parameters["weight"]
    direction = torch.linspace(-1, 2, 512 * 3, dtype=torch.float64).view(512, 3).bfloat16().double()
    exact = direction.t() @ x.bfloat16().double()
    assert float((half - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_a_weight_cast_by_autocast_keeps_its_graph_for_later_uses() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + torch.bmm(x.unsqueeze(0), self.inner.weight.unsqueeze(0)).squeeze(0)

    torch.manual_seed(1)
    check(Both(), [torch.randn(3, 4) for _ in range(2)], autocast=True, tolerance=0.02)


def test_a_split_module_pickles_copies_and_saves_as_before() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 3))
    before = {name: value.shape for name, value in module.state_dict().items()}
    binding = split(module, FlatLayer(module))
    assert {name: value.shape for name, value in module.state_dict().items()} == before
    x = torch.randn(2, 4)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(other[0](x), module[0](x))
        assert other[0].weight is not module[0].weight
        assert other[0].forward.args[0] is other[0]
    unsplit(binding)
    assert "forward" not in module[0].__dict__


def test_modules_that_only_look_like_a_linear_layer_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    torch.manual_seed(1)
    with default_dtype(torch.float64):
        module = nn.Sequential(Doubled(4, 4), parametrized.double())
        check(module, [torch.randn(3, 4) for _ in range(2)])
