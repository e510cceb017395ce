"""What the split promises to the engine and to user code beside the values of gradients."""

from __future__ import annotations

import copy
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import GradientError
from pipeline.gradients import FlatLayer, WeightGradQueue, drain_together, split
from pipeline.gradients.site import Site
from tests.pipeline.splitting import check, default_dtype, plainly, splitting


def batches(*shape: int, count: int = 3) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(*shape) for _ in range(count)]


def run(module: nn.Module, x: Tensor, *, inline: bool = False) -> WeightGradQueue:
    """F and I (or B) of one micro-batch; the queue that is left."""
    flat = FlatLayer(module)
    binding, queue = split(module, flat), WeightGradQueue()
    with binding.forward(queue):
        output = module(x)
    with binding.backward(queue, inline=inline):
        output.sum().backward()
    return queue


def test_only_input_and_output_gradient_wait_for_the_weights() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    binding, queue = split(module, FlatLayer(module)), WeightGradQueue()
    with binding.forward(queue):
        output = module(torch.randn(3, 4))
    node = weakref.ref(output.grad_fn)
    with binding.backward(queue, inline=False):
        output.sum().backward()
    del output
    assert node() is None
    assert len(queue) == 2
    assert queue.nbytes == 4 * (3 * 4 + 3 * 8 + 3 * 8 + 1)  # the gradient of a sum is one number, expanded
    queue.drain()
    assert queue.nbytes == 0


def test_a_queue_releases_what_it_has_done_before_the_rest() -> None:
    queue = run(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(3, 2))
    kept = [weakref.ref(x) for _, x, _, _ in queue.work]
    site = queue.work[1][0]
    alive = []

    def accumulate(site: Site, x: Tensor, dy: Tensor) -> None:
        alive.append([reference() is not None for reference in kept])

    site.operator = site.operator._replace(accumulate=accumulate)
    queue.drain()
    assert alive == [[False, True]]


def test_gradients_asked_for_in_forward_are_ordinary() -> None:
    class Penalised(nn.Module):
        """A penalty on the gradient of its own output, and a step of gradient descent on its weight."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.outer = nn.Conv1d(1, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.outer(self.inner(x).tanh().unsqueeze(1)).sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            (other,) = torch.autograd.grad(self.inner(x.detach()).square().sum(), self.inner.weight)
            return self.inner(x) @ (self.inner.weight - 0.1 * other) + slope.square().sum()

    with default_dtype(torch.float64):
        torch.manual_seed(1)
        check(Penalised(), batches(3, 4))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(3, 4, 3)])
def test_double_backward(make: Callable[[], nn.Module]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x).sin()
            slopes = torch.autograd.grad(y.sum(), [x, *self.inner.parameters()], create_graph=True)
            return y.sum() + sum(slope.cos().sum() for slope in slopes)

    with default_dtype(torch.float64):
        torch.manual_seed(1)
        check(Twice(), batches(2, 3, 4))


@pytest.mark.parametrize("kind", ["tensor", "bias", "post"])
def test_hooks_of_the_user_fire_once_a_micro_batch(kind: str) -> None:
    with default_dtype(torch.float64):
        torch.manual_seed(1)
        module, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), batches(3, 4)
        calls: list[Tensor] = []

        def prepare(module: nn.Module) -> None:
            parameter = module[0].bias if kind == "bias" else module[0].weight
            if kind == "post":
                parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
            else:
                parameter.register_hook(lambda gradient: calls.append(gradient) or 2 * gradient)

        expected = copy.deepcopy(module)
        prepare(expected)
        plain = plainly(expected, inputs)
        seen, calls[:] = list(calls), []
        for inline in (True, False):
            mine = splitting(copy.deepcopy(module), inputs, inline=inline, prepare=prepare)
            torch.testing.assert_close(mine.parameters, plain.parameters, rtol=1e-12, atol=1e-12)
            assert len(calls) == 3
            torch.testing.assert_close(calls, seen, rtol=1e-12, atol=1e-12)
            calls.clear()


def test_a_weight_used_by_something_else_from_some_micro_batch_on() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y * self.inner.weight.norm() if x.sum() > 0 else y

    with default_dtype(torch.float64):
        torch.manual_seed(1)
        inputs = [-torch.rand(3, 4), torch.rand(3, 4), -torch.rand(3, 4)]
        module = Sometimes()
        plain = plainly(copy.deepcopy(module), inputs)
        for inline in (True, False):
            mine = splitting(copy.deepcopy(module), inputs, inline=inline)
            torch.testing.assert_close(mine.parameters, plain.parameters, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [8, 64, 256])
def test_reference_numerics_are_autograds_bits(width: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, width)
            self.first = nn.Linear(width, 2 * width)
            self.second = nn.Linear(2 * width, width, bias=False)
            self.norm = nn.LayerNorm(width)
            self.conv = nn.Conv1d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.table(x)
            for _ in range(2):
                y = y + self.second(functional.gelu(self.first(self.norm(y))))
            return y + self.conv(y)

    torch.manual_seed(1)
    module, inputs = Mixed(), [torch.randint(50, (4, 16)) for _ in range(3)]
    plain = plainly(copy.deepcopy(module), inputs)
    for inline in (True, False):
        mine = splitting(copy.deepcopy(module), inputs, inline=inline, reference_numerics=True)
        for name, expected in plain.parameters.items():
            assert torch.equal(mine.parameters[name], expected), name


def test_half_precision_parameters_accumulate_in_single_precision() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(5, 5, 3)).bfloat16()
    inputs = [torch.randint(9, (2, 5)) for _ in range(64)]
    exact = plainly(copy.deepcopy(module).double(), inputs)
    inline, deferred = (splitting(copy.deepcopy(module), inputs, inline=inline) for inline in (True, False))
    for name, expected in exact.parameters.items():
        assert inline.parameters[name].dtype == torch.float32
        assert torch.equal(inline.parameters[name], deferred.parameters[name])
        error = (inline.parameters[name].double() - expected).norm() / expected.norm()
        assert error < 0.02, name


def test_weight_gradients_of_several_micro_batches_in_one_product() -> None:
    with default_dtype(torch.float64):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Embedding(7, 6), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(6, 3))
        inputs = [torch.randint(7, (n, 4)) for n in (2, 2, 1, 3)]
        plain = plainly(copy.deepcopy(module), inputs)
        flat = FlatLayer(module)
        binding = split(module, flat)
        queues = [WeightGradQueue() for _ in inputs]
        for number, (queue, x) in enumerate(zip(queues, inputs, strict=True)):
            with binding.forward(queue):
                y = module(x)
            with binding.backward(queue, inline=False):
                y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape) + number)
        products = [counted(work[0]) for work in queues[0].work]
        drain_together(queues)
    assert products == [[1], [1], [1]]
    torch.testing.assert_close(flat.gradients(), plain.parameters, rtol=1e-12, atol=1e-12)


def counted(site: Site) -> list[int]:
    """A list that grows by one with each product of this site."""
    fused, calls = site.operator.accumulate, list[int]()

    def accumulate(site: Site, x: Tensor, dy: Tensor) -> None:
        calls.append(1)
        fused(site, x, dy)

    site.operator = site.operator._replace(accumulate=accumulate)
    return calls


def test_micro_batches_of_different_form_are_not_batched() -> None:
    module = nn.Conv1d(2, 2, 3)
    flat = FlatLayer(module)
    binding, queues = split(module, flat), [WeightGradQueue(), WeightGradQueue()]
    expected = torch.zeros_like(module.weight)
    for length, queue in zip((5, 6), queues, strict=True):
        x = torch.ones(1, 2, length)
        with binding.forward(queue):
            y = module(x)
        with binding.backward(queue, inline=False):
            y.sum().backward()
        expected += length - 2
    drain_together(queues)
    assert torch.equal(flat.gradients()["weight"], expected)


def test_an_error_in_backward_leaves_nothing_behind() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda gradient: 1 / 0)
            return self.inner(x)

    module = Broken()
    binding, queue = split(module, FlatLayer(module)), WeightGradQueue()
    with binding.forward(queue):
        y = module(torch.randn(1, 2, requires_grad=True))
    with pytest.raises(ZeroDivisionError), binding.backward(queue, inline=False):
        y.sum().backward()
    assert len(queue) == 0
    assert not queue.is_open
    assert binding.current is None


def test_outside_of_the_engines_passes_nothing_is_split() -> None:
    module = nn.Linear(3, 2)
    flat = FlatLayer(module)
    split(module, flat)
    y = module(torch.ones(1, 3))
    assert type(y.grad_fn).__name__ == "AddmmBackward0"
    y.sum().backward()
    assert torch.equal(flat.gradients()["weight"], torch.ones(2, 3))


def test_torch_func_runs_the_plain_operators() -> None:
    class Jacobian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            slopes = torch.func.vmap(torch.func.jacrev(lambda v: self.inner(v).sin()))(x)
            swapped = torch.func.functional_call(self.inner, {"weight": self.inner.weight * 2}, (x,))
            return self.inner(x) + slopes.sum(-1) + swapped

    with default_dtype(torch.float64):
        torch.manual_seed(1)
        check(Jacobian(), batches(2, 3))


def test_a_replaced_gradient_is_an_error_that_names_the_parameter() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flat = FlatLayer(module)
    module.zero_grad(set_to_none=False)
    flat.check_gradients()
    module[1].weight.grad = torch.zeros(2, 2)
    with pytest.raises(GradientError, match=r"'1\.weight' was replaced"):
        flat.check_gradients()


def test_an_autograd_function_of_the_users_own_leaves_its_work_to_w() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, queue: WeightGradQueue) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.gradient, ctx.queue = gradient, queue
            return x * weight

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight = ctx.saved_tensors
            ctx.queue.defer(lambda: ctx.gradient.add_((x * dy).sum(0)))
            return dy * weight, None, None, None

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(self.inner(x), self.weight, flat.gradient_of(self.weight), binding.current)

    for inline in (True, False):
        module = Scaled()
        flat = FlatLayer(module)
        binding, queue = split(module, flat), WeightGradQueue()
        x = torch.ones(3, 2)
        with binding.forward(queue):
            y = module(x)
        with binding.backward(queue, inline=inline):
            y.sum().backward()
        assert len(queue) == (0 if inline else 2)
        queue.drain()
        torch.testing.assert_close(flat.gradients()["weight"], module.inner(x).sum(0).detach())


def test_compiled_modules_fall_back() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")
            self.last = nn.Linear(4, 4)
            self.last.compile(backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x)))

    module = Partly()
    flat = FlatLayer(module)
    binding = split(module, flat)
    for _ in range(2):
        queue = WeightGradQueue()
        with binding.forward(queue):
            y = module(torch.ones(2, 4))
        with binding.backward(queue, inline=False):
            y.sum().backward()
        assert len(queue) == 1
        queue.drain()
    assert binding.report().split == ("first.weight",)
    assert all(gradient.any() for gradient in flat.gradients().values())


@pytest.mark.parametrize("together", [False, True])
def test_an_input_that_changes_between_i_and_w_is_an_error(together: bool) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("memory", torch.zeros(1, 2))

        def forward(self, x: Tensor) -> Tensor:
            self.memory.add_(x.detach())
            return self.inner(self.memory) + x

    module = Remembers()
    binding, queues = split(module, FlatLayer(module)), [WeightGradQueue(), WeightGradQueue()]
    for queue in queues:
        with binding.forward(queue):
            y = module(torch.ones(1, 2))
        with binding.backward(queue, inline=False):
            y.sum().backward()
    with pytest.raises(GradientError, match=r"operator on 'inner\.weight' was changed in place between I and W"):
        drain_together(queues) if together else queues[0].drain()


def test_the_c_library_keeps_freed_memory_where_it_can() -> None:
    # In a process of its own, since it is for good.
    file = Path(__file__).parents[2] / "pipeline" / "gradients" / "allocator.py"
    code = f"import runpy; print(runpy.run_path({str(file)!r})['keep_freed_memory']())"
    kept = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert kept.stdout.strip() == str(platform.libc_ver()[0] == "glibc")
