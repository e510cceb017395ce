"""Any layer list trained in plain PyTorch in one process, and the engine held against it in any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import LayerSpec, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.batch import Item
from pipeline.engine import Engine
from pipeline.losses import collect_losses
from pipeline.random_state import key, preserved, seed_generator
from tests.pipeline.layouts import Layout
from tests.pipeline.models import MakeOptimizer, sgd

__all__ = [
    "COMPARED",
    "Case",
    "Layout",
    "Outcome",
    "Plain",
    "agree",
    "check",
    "check_all",
    "plainly",
    "run",
    "spread",
    "train",
]

TOLERANCE = 1e-12  # of float64, relative to the largest number of a layer
COMPARED: list[float] = []
"""The largest relative difference of each comparison so far, for a check that tells it."""


@dataclass(frozen=True)
class Case:
    """A model, and the micro-batches of each step; both are made anew wherever they are needed."""

    model: Callable[[], PipelineModule]
    items: Callable[[int, int], Sequence[Item]]
    """The micro-batches of a step, by its number and the data-parallel rank."""
    steps: int = 2
    optimizer: MakeOptimizer = sgd


@dataclass(frozen=True)
class Outcome:
    """What training was seen to do: weights before and after, and on the way every step's loss and gradient norm."""

    before: Mapping[str, Tensor]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    added: tuple[Mapping[str, float], ...]
    after: Mapping[str, Tensor]


# -- the engine ----------------------------------------------------------------------------------------------


def run(case: Case, layout: Layout, **others: Any) -> Outcome:
    """Train by the engine, all ranks as threads.  Every rank must tell the same losses and norms."""
    outcomes = run_local(_train, layout.ranks, case, layout, others, timeout=60.0)
    for outcome in outcomes[1:]:
        assert (outcome.losses, outcome.norms) == (outcomes[0].losses, outcomes[0].norms)
    return outcomes[0]


def _train(case: Case, layout: Layout, others: Mapping[str, Any]) -> Outcome:
    engine = initialize(case.model(), config=layout.settings(**others), optimizer=case.optimizer)
    return train(engine, case)


def train(engine: Engine, case: Case) -> Outcome:
    """Train on the calling rank with an engine that has been made."""
    before = engine.full_state_dict()
    losses, norms, added = [], [], []
    for step in range(case.steps):
        losses.append(engine.train_batch(case.items(step, engine.mesh.data_rank)).item())
        norms.append(engine.stats.gradient_norm if engine.stats else 0.0)
        added.append(engine.losses())
    return Outcome(before, tuple(losses), tuple(norms), tuple(added), engine.full_state_dict())


# -- plain PyTorch -------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """The layers of a list as ordinary modules, each module once; the names are those of ``full_state_dict``."""

    def __init__(self, module: PipelineModule, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.module, self.seed = module, seed
        self.functions: list[Callable[[Any], Any]] = []
        tied: dict[str, nn.Module] = {}
        memo: dict[int, Any] = {}  # what ready modules share stays shared
        for index, entry in enumerate(module.entries):
            if isinstance(entry, nn.Module):
                function: Any = copy.deepcopy(entry, memo)
            elif isinstance(entry, LayerSpec):
                function = entry.factory(*entry.args, **entry.kwargs)
            elif isinstance(entry, TiedLayerSpec):
                if entry.key not in tied:
                    tied[entry.key] = entry.factory(*entry.args, **entry.kwargs)
                function = tied[entry.key]
            else:
                function = entry
            if isinstance(function, nn.Module) and not any(function is layer for layer in self.layers.values()):
                self.layers[str(index)] = function
            special = entry.forward if isinstance(entry, TiedLayerSpec) else None
            self.functions.append(partial(special, function) if special else function)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, each once."""
        buffers = {name: t for name, t in self.named_buffers() if name in self.state_dict()}
        return {**dict(self.named_parameters()), **buffers}

    def forward(self, item: Item, step: int, number: int, added: list[tuple[str, Tensor]]) -> tuple[Any, Tensor]:
        """Output and loss of one micro-batch, with the random numbers that its place in training fixes."""
        x = item.inputs
        outer = collect_losses(added)
        try:
            for index, function in enumerate(self.functions):
                seed_generator(torch.device("cpu"), key(self.seed, step, number, index))
                x = function(x)
            return x, self.module.loss_fn(x, item.targets)
        finally:
            collect_losses(outer)

    def weight(self, item: Item) -> float:
        first = item.targets if item.targets is not None else item.inputs
        return self.module.loss_weight(first)


def plainly(case: Case, layout: Layout, before: Mapping[str, Tensor], *, clip: float | None = None) -> Outcome:
    """Train by autograd in one graph a micro-batch: gradients of the weighted mean of all losses of a step."""
    with preserved(torch.device("cpu")):
        model = Plain(case.model())
        with torch.no_grad():
            assert before.keys() == model.tensors().keys()
            for name, tensor in model.tensors().items():
                tensor.copy_(before[name])
        optimizer = case.optimizer([{"params": [p]} for p in model.parameters()])
        losses, norms, added = [], [], []
        for step in range(case.steps):
            loss, of_layers = _one_step(model, case, layout, step)
            trained = [p for p in model.parameters() if p.requires_grad]
            norms.append(float(nn.utils.clip_grad_norm_(trained, float("inf") if clip is None else clip)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            losses.append(loss)
            added.append(of_layers)
    after = {name: tensor.detach().clone() for name, tensor in model.tensors().items()}
    return Outcome(before, tuple(losses), tuple(norms), tuple(added), after)


def _one_step(model: Plain, case: Case, layout: Layout, step: int) -> tuple[float, dict[str, float]]:
    items = [
        (rank * layout.micro_batches + number, item)
        for rank in range(layout.data_parallel)
        for number, item in enumerate(case.items(step, rank))
    ]
    total = sum(model.weight(item) for _, item in items)
    mean, means = 0.0, {}
    for number, item in items:
        added: list[tuple[str, Tensor]] = []
        share = model.weight(item) / total
        _, loss = model(item, step, number, added)
        everything = sum((value for _, value in added), loss) * share
        if everything.requires_grad:
            everything.backward()
        mean += loss.item() * share
        for name, value in added:
            means[name] = means.get(name, 0.0) + value.item() * share
    return mean, means


# -- the comparison ------------------------------------------------------------------------------------------


def check(case: Case, layout: Layout, *, tolerance: float = TOLERANCE, **others: Any) -> Outcome:
    """Train by the engine and plainly; losses, norms and what became of every layer must agree."""
    found = run(case, layout, **others)
    expected = plainly(case, layout, found.before, clip=others.get("gradient_clipping"))
    agree(found, expected, str(layout), tolerance)
    return found


def agree(found: Outcome, expected: Outcome, where: str, tolerance: float = TOLERANCE) -> None:
    """Losses, norms and added losses agree to ``tolerance``, changes of weights relative to the layer's largest."""
    assert found.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance), where
    assert found.norms == pytest.approx(expected.norms, rel=10 * tolerance, abs=tolerance), where
    for ours, theirs in zip(found.added, expected.added, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance), where
    assert found.after.keys() == expected.after.keys(), where
    apart = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(found.losses, expected.losses, strict=True)]
    moved = {name: (tensor - found.before[name]).abs() for name, tensor in expected.after.items()}
    for name, tensor in expected.after.items():
        layer = name.split(".")[1]
        largest = max(float(m.max()) for other, m in moved.items() if other.split(".")[1] == layer and m.numel())
        difference = float((found.after[name] - tensor).abs().max()) if tensor.numel() else 0.0
        assert difference <= tolerance * largest, f"{where}: {name} differs by {difference}, it moved by {largest}"
        apart.append(difference / largest if difference else 0.0)
    COMPARED.append(max(apart, default=0.0))


def check_all(case: Case, layouts: Iterable[Layout], **others: Any) -> None:
    """``check`` for each of them."""
    for layout in layouts:
        check(case, layout, **others)


def spread(layers: int, micro_batches: int = 4, **others: Any) -> list[Layout]:
    """Layouts that between them put every boundary between two ranks, two stages of a rank, and two layers: each
    schedule once or more, backward split or not, recomputed or not, one copy of the pipeline or two."""
    made = [
        Layout("1f1b", 1, 1, micro_batches, **others),
        Layout("1f1b", 4, 1, micro_batches, data_parallel=2, **others),
        Layout("gpipe", min(3, layers), 1, micro_batches, recompute="every", **others),
        Layout("interleaved-1f1b", 2, 2, micro_batches, **others),
        Layout("split", min(4, layers), 1, micro_batches, **others),
        Layout("vee", 2, 2, micro_batches, recompute="every:2", **others),
    ]
    return [layout for layout in made if layout.ranks // layout.data_parallel * layout.stages_per_rank <= layers]
