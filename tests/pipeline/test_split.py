"""The split of backward gives autograd's gradients, whichever way a layer uses its weights."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.gradients import Binding, FlatLayer, WeightGradQueue, split

Make = Callable[[], nn.Module]


class Twice(nn.Module):
    """One operator used twice on different inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x.flip(0) if x.is_floating_point() else (x + 1) % 7).tanh()


class Checkpointed(nn.Module):
    """One operator recomputed in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda v: self.inner(v).sin(), x, use_reentrant=self.reentrant)


class AlsoElsewhere(nn.Module):
    """A weight that the operator uses, and an expression that nobody recognises."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.weight.square().mean()


OPERATORS: dict[str, tuple[Make, Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), lambda: torch.randn(3, 4, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), lambda: torch.randn(4, 6)),
    "linear of a vector": (lambda: nn.Linear(6, 5), lambda: torch.randn(6)),
    "embedding": (lambda: nn.Embedding(7, 5), lambda: torch.randint(7, (3, 4))),
    "embedding with padding": (lambda: nn.Embedding(7, 5, padding_idx=2), lambda: torch.randint(7, (3, 4))),
    "embedding by frequency": (
        lambda: nn.Embedding(7, 5, scale_grad_by_freq=True),
        lambda: torch.randint(7, (9,)),
    ),
    "sparse embedding": (lambda: nn.Embedding(7, 5, sparse=True), lambda: torch.randint(7, (9,))),
    "embedding of bounded norm": (lambda: nn.Embedding(7, 5, max_norm=0.5), lambda: torch.randint(7, (9,))),
    "convolution 1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), lambda: torch.randn(2, 3, 8)),
    "convolution 2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=2),
        lambda: torch.randn(2, 4, 7, 6),
    ),
    "convolution 3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), lambda: torch.randn(2, 2, 3, 4, 3)),
    "convolution of one sample": (lambda: nn.Conv2d(2, 3, 3), lambda: torch.randn(2, 5, 5)),
    "convolution, same": (lambda: nn.Conv1d(3, 4, 4, padding="same"), lambda: torch.randn(2, 3, 8)),
    "convolution, valid": (lambda: nn.Conv1d(3, 4, 4, padding="valid"), lambda: torch.randn(2, 3, 8)),
    "convolution, circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
        lambda: torch.randn(2, 2, 5, 6),
    ),
    "convolution transposed": (lambda: nn.ConvTranspose1d(3, 4, 3), lambda: torch.randn(2, 3, 8)),
    "attention": (lambda: Attention(), lambda: torch.randn(2, 3, 8)),
    "recurrent": (lambda: First(nn.LSTM(4, 3, num_layers=2)), lambda: torch.randn(5, 2, 4)),
    "norm": (lambda: nn.LayerNorm(6), lambda: torch.randn(3, 6)),
}


class First(nn.Module):
    """The first result of a module that has several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Attention(nn.Module):
    """PyTorch's own attention module, which calls its projections by functional operators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "used twice": Twice,
    "checkpointed": lambda m: Checkpointed(m, reentrant=False),
    "checkpointed by re-entering": lambda m: Checkpointed(m, reentrant=True),
}


def gradients(
    module: nn.Module, batches: list[Tensor], *, mode: str, input_grad: bool = True, autocast: bool = False
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Gradients of the parameters over all micro-batches and of each input, by `mode`: plain, inline or deferred."""
    flat = binding = None
    if mode != "plain":
        flat = FlatLayer(module)
        binding = split(module, flat)
    queues, inputs = [], []
    for number, batch in enumerate(batches):
        x = batch.clone().requires_grad_(input_grad and batch.is_floating_point())
        queue = WeightGradQueue()
        if binding is not None:
            binding.queue = queue
        with torch.autocast("cpu", enabled=autocast):
            output = module(x)
        direction = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape) + number
        if binding is not None:
            binding.queue = WeightGradQueue()  # another micro-batch's forward came between
        run_backward(binding, queue, output, direction.to(output.dtype), inline=mode == "inline")
        queues.append(queue)
        inputs.append(x.grad)
    for queue in queues:
        queue.drain()
    if flat is not None:
        flat.check_gradients()
        return {name: value.clone() for name, value in flat.gradients().items()}, inputs
    named = module.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in named}, inputs


def run_backward(
    binding: Binding | None, queue: WeightGradQueue, output: Tensor, direction: Tensor, *, inline: bool
) -> None:
    if not output.requires_grad:
        return
    if binding is None:
        output.backward(direction)
        return
    binding.queue = queue
    with queue.opened(inline=inline):
        output.backward(direction)


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    largest = max((float(value.abs().max()) for value in theirs.values()), default=0.0)
    for name, value in mine.items():
        assert float((value - theirs[name]).abs().max()) <= tolerance * max(largest, 1e-300), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_equal_autograd(operator: str, way: str) -> None:
    make, sample = OPERATORS[operator]
    torch.manual_seed(1)
    if way == "checkpointed by re-entering" and not sample().is_floating_point():
        pytest.skip("a re-entering checkpoint needs an input that needs a gradient")
    torch.set_default_dtype(torch.float64)
    try:
        module = WAYS[way](make())
        batches = [sample() for _ in range(3)]
        results = {
            mode: gradients(copy.deepcopy(module), batches, mode=mode)
            for mode in ("plain", "inline", "deferred")
        }
    finally:
        torch.set_default_dtype(torch.float32)
    plain, inline, deferred = results["plain"], results["inline"], results["deferred"]
    close(inline[0], plain[0], 1e-12)
    assert all(torch.equal(inline[0][name], deferred[0][name]) for name in inline[0])
    for mine, later, theirs in zip(inline[1], deferred[1], plain[1], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine, later)
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_only_input_and_output_gradient_wait_for_the_weights() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    binding = split(module, FlatLayer(module))
    binding.queue = queue = WeightGradQueue()
    output = module(torch.randn(3, 4))
    node = weakref.ref(output.grad_fn)
    with queue.opened():
        output.sum().backward()
    del output
    assert node() is None
    assert len(queue) == 2
    assert queue.nbytes == 4 * (3 * 4 + 3 * 8 + 3 * 8 + 1)  # the last gradient is one number, expanded
    queue.drain()
    assert queue.nbytes == 0


def test_a_split_module_pickles_copies_and_saves_as_before() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 3))
    before = module.state_dict()
    binding = split(module, FlatLayer(module))
    assert {k: v.shape for k, v in module.state_dict().items()} == {k: v.shape for k, v in before.items()}
    x = torch.randn(2, 4)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(other[0](x), module[0](x))
        assert other[0].weight is not module[0].weight
        assert other[0].forward.args[0] is other[0]
    binding.unsplit()
    assert "forward" not in module[0].__dict__
    assert functional.linear(x, module[0].weight, module[0].bias).equal(module[0](x))
