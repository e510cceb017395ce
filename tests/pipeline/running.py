"""A case trained by the engine in a layout, its ranks threads or real processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline import initialize, run_local
from pipeline.engine import Engine
from pipeline.state import named_state
from tests.pipeline.layouts import Layout
from tests.pipeline.models import GradientsAsParameters, MakeOptimizer, Recipe, micro_batches, sgd, transformer
from tests.pipeline.processes import run_processes
from tests.pipeline.reference import Case, Outcome, train

ARGUMENTS = ("lr_scheduler", "param_groups", "profile")
"""What ``initialize`` takes beside the settings."""


def transformer_case(recipe: Recipe, count: int, *, steps: int = 3, optimizer: MakeOptimizer = sgd) -> Case:
    """The transformer on ``count`` micro-batches a step."""
    return Case(partial(transformer, recipe), partial(micro_batches, count), steps, optimizer)


def start(case: Case, layout: Layout, **others: Any) -> Engine:
    """An engine on the calling rank; ``others`` are settings over the layout's, or arguments of ``initialize``."""
    arguments = {name: others.pop(name) for name in ARGUMENTS if name in others}
    return initialize(case.model(), config=layout.settings(**others), optimizer=case.optimizer, **arguments)


def run(case: Case, layout: Layout, *, processes: bool = False, **others: Any) -> Outcome:
    """Train on all ranks.  Every rank must tell the same losses and norms, and hold the same bits as the others."""
    return agreed(everywhere(train_here, layout.ranks, case, layout, processes=processes, **others), layout)


def gradients(case: Case, layout: Layout, **others: Any) -> Outcome:
    """One step whose gradients are left in ``after``."""
    return run(replace(case, steps=1, optimizer=GradientsAsParameters), layout, **others)


def train_here(case: Case, layout: Layout, **others: Any) -> tuple[Outcome, bool]:
    """Train on the calling rank; the outcome, and whether what it holds are the bits of rank 0's whole state."""
    engine = start(case, layout, **others)
    outcome = train(engine, case)
    return outcome, copies_agree(engine, outcome.after)


def agreed(results: Sequence[tuple[Outcome, bool]], layout: Layout) -> Outcome:
    """The outcome of rank 0, which has the weights; raises AssertionError where another rank contradicts it."""
    first, _ = results[0]
    for rank, (outcome, agrees) in enumerate(results):
        if (outcome.losses, outcome.norms) != (first.losses, first.norms):
            raise AssertionError(f"{layout}: rank {rank} has losses {outcome.losses}, rank 0 {first.losses}")
        if not agrees:
            raise AssertionError(f"{layout}: what rank {rank} holds has drifted from what the others hold")
    return first


def copies_agree(engine: Engine, state: Mapping[str, Tensor]) -> bool:
    """Whether all that this rank holds, copies included, are the bits in ``state``, which rank 0 has.  Collective."""
    runner = engine._planned()
    whole = engine.mesh.world.broadcast_object(dict(state), 0)
    with runner.whole():
        held = named_state(runner.built, runner.all_ties)
        return all(torch.equal(whole[name], tensor) for name, tensor in (*held.owned.items(), *held.copies.items()))


def everywhere(
    worker: Callable[..., Any], ranks: int, *args: Any, processes: bool = False, timeout: float = 60.0, **others: Any
) -> list[Any]:
    """``worker(*args, **others)`` on every rank; the results in rank order.

    ``timeout``: seconds in which processes must end, or that a thread may wait for another.
    """
    if processes:
        return run_processes(_call, ranks, worker, args, others, timeout=timeout)
    return run_local(_call, ranks, worker, args, others, timeout=timeout)


def _call(worker: Callable[..., Any], args: Sequence[Any], others: Mapping[str, Any]) -> Any:
    return worker(*args, **others)


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference between gradients, relative to the largest gradient of its layer."""
    if found.keys() != expected.keys():
        raise AssertionError(f"other names: {sorted(found.keys() ^ expected.keys())}")
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        layer = name.split(".")[1]
        largest[layer] = max(largest.get(layer, 0.0), float(tensor.abs().max()))
    apart = {name: float((found[name] - tensor).abs().max()) for name, tensor in expected.items()}
    return max((d / largest[name.split(".")[1]] if d else 0.0) for name, d in apart.items())


def same_bits(found: Outcome, expected: Outcome) -> bool:
    """Whether losses, norms, first weights and last weights are equal to the last bit."""
    return (
        (found.losses, found.norms) == (expected.losses, expected.norms)
        and _equal(found.before, expected.before)
        and _equal(found.after, expected.after)
    )


def _equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())
