"""A model trained on data-parallel ranks that hold parts of it: by pipeloom, by torch's FSDP2 and by DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize
from pipeline.engine import Engine

LAYERS, WIDTH, ROWS = 12, 2048, 8  # 50 million parameters
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)

Step = Callable[[], object]
adamw = partial(torch.optim.AdamW, lr=1e-4, foreach=True)


class Block(nn.Module):
    """x + gelu(linear(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.linear(x))


def batch() -> tuple[Tensor, Tensor]:
    """The rows of one rank, other ones on each."""
    generator = torch.Generator().manual_seed(distributed.get_rank() if distributed.is_initialized() else 0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.zeros(ROWS, WIDTH)


def of_pipeloom(ranks: int, *, items: int = 1, **settings: Any) -> tuple[Engine, Step]:
    """An engine on one stage and as many copies of it, and its step on so many micro-batches."""
    module = PipelineModule([LayerSpec(Block) for _ in range(LAYERS)], functional.mse_loss)
    config = {"data_parallel": ranks, "micro_batches": 1, "partition": "uniform", "schedule": "1f1b", **settings}
    engine = initialize(module, config=config, optimizer=adamw)
    every = [batch()] * items
    return engine, lambda: engine.train_batch(iter(every))


def of_fsdp(ranks: int) -> Step:
    """A step of FSDP2, wrapped layer by layer, which lets parameters go after forward: what ZeRO 3 is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model, adamw(model.parameters()))


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    inputs, targets = batch()

    def step() -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def of_deepspeed(stage: int) -> Step | None:
    """A step of DeepSpeed by ZeRO of this stage; None where it is not installed."""
    try:
        import deepspeed
    except ImportError:
        return None
    deepspeed.init_distributed("gloo")
    settings: Mapping[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    inputs, targets = batch()

    def step() -> None:
        engine.backward(functional.mse_loss(engine(inputs), targets))
        engine.step()

    return step
