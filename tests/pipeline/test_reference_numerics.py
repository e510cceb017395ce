"""With `reference_numerics` a step gives the bits of plain PyTorch, not only its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, initialize, run_local


def model() -> PipelineModule:
    ends = LayerSpec(nn.Linear, 64, 96), LayerSpec(nn.Linear, 96, 8)
    layers = [ends[0], nn.functional.gelu, LayerSpec(nn.LayerNorm, 96), ends[1]]
    return PipelineModule(layers, nn.functional.mse_loss)


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(32, 64, generator=generator), torch.randn(32, 8, generator=generator)) for _ in range(4)]


def after_one_step(reference_numerics: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters before and after a step of SGD with a learning rate of 1, which is minus the gradient."""
    config = {"micro_batches": 4, "partition": "uniform", "reference_numerics": reference_numerics}
    engine = initialize(model(), config=config, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0))
    before = engine.full_state_dict()
    engine.train_batch(micro_batches())
    return before, engine.full_state_dict()


def plain_gradients(values: dict[str, Tensor]) -> dict[str, Tensor]:
    modules: list[Any] = [nn.Linear(64, 96), nn.functional.gelu, nn.LayerNorm(96), nn.Linear(96, 8)]
    parameters = {f"layers.{i}.{n}": p for i in (0, 2, 3) for n, p in modules[i].named_parameters()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    for x, target in micro_batches():
        for module in modules:
            x = module(x)
        nn.functional.mse_loss(x, target).backward(torch.tensor(0.25))
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bits_are_those_of_plain_pytorch(ranks: int) -> None:
    before, after = run_local(after_one_step, ranks, True)[0]
    gradients = plain_gradients(before)
    assert sorted(gradients) == sorted(before)
    for name, gradient in gradients.items():
        assert torch.equal(after[name], before[name] - gradient), name
