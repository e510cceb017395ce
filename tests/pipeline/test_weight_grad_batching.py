"""W of several micro-batches in one product, and what the report says of weights that W does not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineConfig, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.errors import ConfigError
from pipeline.executor import _side_by_side
from pipeline.gradients.queue import WeightGradQueue
from schedules import build

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH, RANKS, MICRO_BATCHES = 4, 2, 6


class Scaled(nn.Module):
    """A matrix that no operator which splits takes, beside one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table.cos().sum(0)


def items() -> list[Item]:
    generator = torch.Generator().manual_seed(0)
    return [Item(*torch.randn(2, 3, WIDTH, generator=generator)) for _ in range(MICRO_BATCHES)]


def engine_of(schedule: str, stages: int, **settings: Any) -> Any:
    layers = [LayerSpec(Scaled), LayerSpec(nn.LayerNorm, WIDTH)] * RANKS * stages
    config = {"schedule": schedule, "stages_per_rank": stages, "micro_batches": MICRO_BATCHES, "partition": "uniform"}
    optimizer = lambda groups: torch.optim.SGD(groups, lr=0.1)  # noqa: E731
    return initialize(PipelineModule(layers, functional.mse_loss), config={**config, **settings}, optimizer=optimizer)


@pytest.mark.parametrize(("schedule", "stages"), [("zb-h1", 1), ("zb-h2", 1), ("interleaved-zb", 2), ("zb-v", 2)])
def test_batched_products_agree_with_single_ones(schedule: str, stages: int) -> None:
    def train(batched: bool) -> tuple[list[float], dict[str, Tensor]]:
        engine = engine_of(schedule, stages, weight_grad_batching=batched)
        return [engine.train_batch(items()).item() for _ in range(3)], engine.full_state_dict()

    (losses, found), (expected_losses, expected) = (run_local(train, RANKS, batched)[0] for batched in (True, False))
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-12 * float(tensor.abs().max()), name


def test_w_that_stand_side_by_side_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    drained = []
    drain = WeightGradQueue.drain

    def counted(queue: WeightGradQueue) -> None:
        drained.extend(dy.shape[0] for _, _, dy, _ in queue.work)
        drain(queue)

    monkeypatch.setattr(WeightGradQueue, "drain", counted)

    def train(batched: bool) -> None:
        engine_of("zb-h1", 1, weight_grad_batching=batched).train_batch(items())

    sizes = []
    for batched in (False, True):
        drained.clear()
        run_local(train, RANKS, batched)
        sizes.append(sorted(drained))
    rows = build("zb-h1", ranks=RANKS, micro_batches=MICRO_BATCHES).rows
    groups = [len(group) for row in rows for group in _side_by_side(row).values() if group]
    # Two linear layers on every rank, each with 3 rows a micro-batch, of which the first backward is drained by itself.
    assert set(sizes[0]) == {3}
    assert max(sizes[1]) == 3 * max(groups) > 3
    assert sum(sizes[1]) >= sum(sizes[0])


def test_which_w_stand_side_by_side() -> None:
    row = build("zb-h1", ranks=3, micro_batches=4).rows[1]
    assert " ".join(map(str, row)) == "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"
    assert _side_by_side(row) == {5: (0,), 8: (1,), 10: (2, 3), 11: ()}


def test_it_contradicts_reference_numerics() -> None:
    with pytest.raises(ConfigError, match="weight_grad_batching sums over several micro-batches in one product"):
        PipelineConfig(weight_grad_batching=True, reference_numerics=True)


def test_the_report_of_the_whole_model() -> None:
    def worker() -> tuple[str, float]:
        engine = engine_of("zb-h1", 1)
        engine.train_batch(items())
        split = engine.split_report()
        return str(split), split.share

    told = run_local(worker, RANKS)
    assert told[0] == told[1]
    text, share = told[0]
    assert text.splitlines() == [
        "layer 0 (Scaled): table gets its gradient in I, since no operator that is split takes it (used by cos)",
        "layer 2 (Scaled): table gets its gradient in I, since no operator that is split takes it (used by cos)",
    ]
    assert share == pytest.approx(2 * 8 / (2 * 8 + 2 * 16))
