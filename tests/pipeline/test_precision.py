"""Layers in types of their own: as a plain implementation computes, the same bits in every layout, fp16 in range."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineConfig, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import ConfigError, NonFiniteLoss
from pipeline.precision.loss_scale import LossScale, Scaling
from pipeline.precision.types import types_of
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe, restless
from tests.pipeline.running import everywhere, run, same_bits, transformer_case

WIDTH = 4
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def model() -> PipelineModule:
    return PipelineModule(
        [
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            torch.tanh,
            LayerSpec(nn.LayerNorm, WIDTH),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
        ],
        functional.mse_loss,
    )


def items(step: int, data_rank: int, count: int = 4) -> list[Item]:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return [Item(*torch.randn(2, 3, WIDTH, generator=generator)) for _ in range(count)]


# -- which layer has which type ------------------------------------------------------------------------------


def tied() -> PipelineModule:
    table = partial(TiedLayerSpec, "wte", nn.Embedding, 5, 4)
    return PipelineModule(
        [table(), LayerSpec(nn.LayerNorm, 4), LayerSpec(nn.Linear, 4, 4), table(forward=lambda m, x: x)],
        functional.mse_loss,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("as_built", [None, None, None, None]),
        ("bf16", ["bf16", "bf16", "bf16", "bf16"]),
        ({"*": "bf16", "*norm*": "fp32"}, ["bf16", "fp32", "bf16", "bf16"]),
        ({"*norm*": "fp32", "*": "bf16"}, ["bf16", "bf16", "bf16", "bf16"]),  # the last that matches
        ({"WTE": "fp32", "2": "fp16"}, ["fp32", None, "fp16", "fp32"]),
        ("linear=fp16,*norm=bf16", [None, "bf16", "fp16", None]),
    ],
)
def test_the_last_pattern_that_matches_gives_a_layer_its_type(given: Any, expected: list[str | None]) -> None:
    config = PipelineConfig(precision=given)
    assert types_of(config.precision, tied()) == tuple(None if kind is None else TYPES[kind] for kind in expected)
    assert PipelineConfig.load(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fp8", "precision = 'fp8' is not possible: it must be as_built, fp32, bf16 or fp16"),
        ({"*": "half"}, "it must be as_built, fp32, bf16 or fp16, or such a type for each pattern"),
        ({"Conv*": "bf16"}, "precision names 'Conv\\*', which no layer matches; there are layers 0 to 3, of the types"),
        ({"0": "bf16"}, "layers 0 and 3, which are tied as 'wte', different types"),
    ],
)
def test_what_cannot_be_is_said(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        types_of(PipelineConfig(precision=given).precision, tied())


def test_on_the_command_line() -> None:
    config = PipelineConfig.load(None, ["--precision", "*=bf16,*norm*=fp32", "--loss-scale", "128"])
    assert config.precision == (("*", "bf16"), ("*norm*", "fp32"))
    assert config.loss_scale == 128.0


# -- as a plain implementation -------------------------------------------------------------------------------


def _engine(layout: Layout, **settings: Any) -> Any:
    return initialize(model(), config=layout.settings(**settings), optimizer=partial(torch.optim.SGD, lr=0.1))


def _train(layout: Layout, steps: int, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    engine = _engine(layout, **settings)
    before = engine.full_state_dict()
    losses = [engine.train_batch(items(s, engine.mesh.data_rank)).item() for s in range(steps)]
    return losses, {**{f"before.{n}": t for n, t in before.items()}, **engine.full_state_dict()}


def _plainly(before: dict[str, Tensor], kinds: list[torch.dtype], steps: int, count: int = 4) -> dict[str, Tensor]:
    """Master weights in fp32, layers on their roundings, gradients of micro-batches added in fp32."""
    masters = {name: tensor.float() for name, tensor in before.items()}
    for step in range(steps):
        total = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
        for item in items(step, 0, count):
            low = {n: t.clone().to(kinds[int(n.split(".")[1])]).requires_grad_() for n, t in masters.items()}
            x = item.inputs
            for index, kind in enumerate(kinds):
                weight, bias = low.get(f"layers.{index}.weight"), low.get(f"layers.{index}.bias")
                x = x.to(kind)
                if index == 1:
                    x = torch.tanh(x)
                elif index == 2:
                    x = functional.layer_norm(x, (WIDTH,), weight, bias)
                else:
                    x = functional.linear(x, weight, bias)
            (functional.mse_loss(x.float(), item.targets) / count).backward()
            for name, tensor in low.items():
                total[name] += tensor.grad.float()
        for name, tensor in masters.items():
            tensor -= 0.1 * total[name]
    return {n: t.to(kinds[int(n.split(".")[1])]) for n, t in masters.items()}


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", ["fp32", "same"])
def test_training_equals_a_plain_implementation(kind: str, norm: str) -> None:
    precision = {"*": kind} if norm == "same" else {"*": kind, "*norm*": "fp32"}
    kinds = [TYPES[kind]] * 5
    if norm == "fp32":
        kinds[2] = torch.float32
    settings = {"precision": precision, "loss_scale": 1.0}
    _, state = everywhere(_train, 1, Layout("1f1b"), 3, **settings)[0]
    before = {name.removeprefix("before."): t for name, t in state.items() if name.startswith("before.")}
    expected = _plainly(before, kinds, 3)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype == kinds[int(name.split(".")[1])]
        torch.testing.assert_close(state[name], tensor, rtol=2e-2, atol=2e-3)  # of different orders of bf16 roundings


def test_tiny_gradients_of_many_micro_batches_are_not_lost() -> None:
    def engine_and_step() -> tuple[Tensor, Tensor]:
        module = PipelineModule([LayerSpec(nn.Linear, 1, 1, bias=False)], lambda y, t: (y * t).mean())
        config = {"precision": "bf16", "micro_batches": 64, "partition": "uniform", "device": "cpu"}
        engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=1.0))
        before = engine.optimizer.param_groups[0]["params"][0].detach().clone()
        given = [(torch.ones(1, 1), torch.full((1, 1), 64.0 if i == 0 else 0.125)) for i in range(64)]
        engine.train_batch(given)
        return before, engine.optimizer.param_groups[0]["params"][0].detach()

    before, after = run_local(engine_and_step, 1)[0]
    assert (before - after)[0].item() == pytest.approx(1 + 63 * 0.125 / 64, rel=1e-6)  # in bf16 it would be 1


# -- in every layout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_same_bits_in_every_layout(zero: int) -> None:
    case = transformer_case(Recipe(), 4, optimizer=restless)
    layouts = [
        Layout("gpipe", 2, 1, data_parallel=2),
        Layout("1f1b", 4, 1, data_parallel=2),
        Layout("interleaved-1f1b", 4, 2, data_parallel=2, recompute="every"),
        Layout("zb-h1", 6, 1, data_parallel=2),
    ]
    settings = {"precision": {"*": "bf16", "*norm*": "fp32"}, "zero": zero, "zero_reduce_every": "step"}
    first, *others = [run(case, layout, **settings) for layout in layouts]
    assert all(same_bits(other, first) for other in others)
    assert first.after["layers.2.qkv.weight"].dtype == torch.bfloat16


def _go_on(path: str, layout: Layout, first: int, last: int, **settings: Any) -> tuple[dict[str, Tensor], Any]:
    engine = _engine(layout, **settings)
    if first:
        engine.load_checkpoint(path)
    for step in range(first, last):
        engine.train_batch(items(step, engine.mesh.data_rank))
    engine.save_checkpoint(path)
    return engine.full_state_dict(), engine.loss_scale


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize(("zero", "then"), [(0, 0), (1, 3), (3, 2)])
def test_a_checkpoint_is_gone_on_from_with_the_same_bits(tmp_path: Any, kind: str, zero: int, then: int) -> None:
    settings = {"precision": kind, "loss_scale_initial": 4.0, "loss_scale_window": 1}
    here, there = Layout("1f1b", 4, data_parallel=2), Layout("gpipe", 2, data_parallel=2)
    (whole, *_) = everywhere(_go_on, 4, str(tmp_path / "whole"), here, 0, 4, zero=zero, **settings)
    everywhere(_go_on, 4, str(tmp_path / "half"), here, 0, 2, zero=zero, **settings)
    (found, *_) = everywhere(_go_on, 2, str(tmp_path / "half"), there, 2, 4, zero=then, **settings)
    assert found[1] == whole[1]
    assert found[0].keys() == whole[0].keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in whole[0].items())


def test_another_precision_goes_on_from_the_masters(tmp_path: Any) -> None:
    everywhere(_go_on, 2, str(tmp_path), Layout("1f1b", 2), 0, 2, precision="bf16")

    def masters(**settings: Any) -> Tensor:
        engine = _engine(Layout("1f1b", 1), **settings)
        engine.load_checkpoint(str(tmp_path))
        vectors = [p.detach() for group in engine.optimizer.param_groups for p in group["params"]]
        return torch.cat([vector[vector != 0] for vector in vectors])  # without padding, of which types have their own

    low, high = everywhere(masters, 1, precision="bf16")[0], everywhere(masters, 1)[0]
    assert torch.equal(low, high)
    assert bool((high != high.bfloat16().float()).any())


# -- the loss scale ------------------------------------------------------------------------------------------


def test_the_scale_moves_as_deepspeeds() -> None:
    how = Scaling(window=2, hysteresis=2)
    scale, trace = LossScale(16.0), []
    for overflow in (0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1):
        scale = scale.after(bool(overflow), how)
        trace.append((scale.value, scale.hysteresis))
    assert trace == [
        (16, 2), (16, 2), (32, 2), (32, 2), (32, 1), (32, 1), (32, 1), (64, 2), (64, 1), (32, 1), (16, 1),
    ]  # fmt: skip
    assert scale.skipped == 4


def test_a_long_trace() -> None:
    """Against the rule written out in another way: the time since the last overflow, counted in steps."""
    generator = torch.Generator().manual_seed(3)
    overflows = (torch.rand(200, generator=generator) < 0.2).tolist()
    how = Scaling(window=3, hysteresis=2, minimum=2.0)
    scale = LossScale(2.0**10)
    expected, left, last = 2.0**10, 2, -1
    for step, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                expected = max(expected / 2, 2.0)
            else:
                left -= 1
            last = step
        elif step - last - 1 > 0 and (step - last - 1) % 3 == 0:
            expected, left = expected * 2, 2
        scale = scale.after(overflow, how)
        assert (scale.value, scale.hysteresis) == (expected, left), step
    assert scale.skipped == sum(overflows)


def _overflow(layout: Layout, at: tuple[int, int], **settings: Any) -> tuple[Any, ...]:
    """Train; in step 1 the item of one micro-batch on one data-parallel rank is too large for fp16."""
    engine = initialize(
        model(),
        config=layout.settings(precision="fp16", loss_scale_initial=8.0, loss_scale_hysteresis=1, **settings),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    rank = engine.mesh.data_rank
    engine.train_batch(items(0, rank))
    before = engine.full_state_dict()
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    huge = items(1, rank)
    if rank == at[0]:
        huge[at[1]] = Item(huge[at[1]].inputs, torch.full_like(huge[at[1]].targets, 1e6))
    engine.train_batch(huge)
    after = engine.full_state_dict()
    same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
    unmoved = rates == [group["lr"] for group in engine.optimizer.param_groups] and engine.steps == 1
    skipped, scale = engine.stats.skipped, engine.loss_scale
    engine.train_batch(items(2, rank))
    return same, unmoved, skipped, scale.value, scale.skipped, engine.steps, engine.stats.skipped


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("at", [(0, 0), (1, 3)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(at: tuple[int, int], zero: int) -> None:
    found = everywhere(_overflow, 4, Layout("1f1b", 4, data_parallel=2), at, zero=zero)
    assert found == [(True, True, True, 4.0, 1, 2, False)] * 4


def test_a_step_is_unscaled_by_the_scale_it_was_computed_with() -> None:
    def norms(**settings: Any) -> list[float]:
        engine = _engine(Layout("1f1b", 1), precision={"*": "fp32", "1": "fp16"}, **settings)
        return [_norm(engine, step) for step in range(6)]

    def _norm(engine: Any, step: int) -> float:
        engine.train_batch(items(step, 0))
        return float(engine.stats.gradient_norm)

    fixed = everywhere(norms, 1, loss_scale=1.0)[0]
    growing = everywhere(norms, 1, loss_scale_initial=2.0, loss_scale_window=1)[0]
    assert growing == pytest.approx(fixed, rel=1e-3)


def test_an_overflow_at_the_minimum_is_told_with_its_layer() -> None:
    def worker() -> None:
        engine = _engine(Layout("1f1b", 2), precision="fp16", loss_scale_initial=1.0, loss_scale_hysteresis=1)
        broken = items(0, 0)
        broken[2] = Item(broken[2].inputs * math.inf, broken[2].targets)
        engine.train_batch(broken)

    with pytest.raises(NonFiniteLoss, match=r"at its minimum of 1; .* is that of micro-batch 2"):
        run_local(worker, 2)


def test_gradients_that_are_not_finite_are_told_with_their_layer() -> None:
    class Rooted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x * 0).sqrt()  # its gradient at 0 is infinite, times 0 not a number

    def worker() -> None:
        module = PipelineModule([LayerSpec(nn.Linear, 2, 2), LayerSpec(Rooted, 2, 2), LayerSpec(nn.Linear, 2, 2)],
                                functional.mse_loss)  # fmt: skip
        config = {"partition": "uniform", "micro_batches": 1, "device": "cpu"}
        engine = initialize(module, config=config, optimizer=torch.optim.SGD)
        engine.train_batch([(torch.ones(1, 2), torch.zeros(1, 2))])

    with pytest.raises(NonFiniteLoss, match=r"on the way back the first gradients .* are those of layer 0 \(Linear\)"):
        run_local(worker, 1)
