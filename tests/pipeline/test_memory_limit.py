"""Layers to recompute are chosen so that every rank keeps within a limit, and training is the same to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from partition import OutOfMemory, Profile, make_partition, predict_memory
from partition.recompute import recomputed
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError
from pipeline.profiler import profile_alone
from tests.pipeline.layouts import Layout
from tests.pipeline.models import LAYERS, Recipe
from tests.pipeline.reference import Outcome, train
from tests.pipeline.running import everywhere, run, same_bits, start, transformer_case


def _measured() -> Profile:
    """Bytes as measured, and times that are the same in every run, since cuts follow them."""
    case = transformer_case(Recipe(), 4)
    measured = profile_alone(case.model(), case.items(0, 0)[0], runs=1)
    even = {"forward": 0.001, "input_grad": 0.001, "weight_grad": 0.001}
    return measured.model_copy(update={"layers": tuple(layer.model_copy(update=even) for layer in measured.layers)})


def _limited(layout: Layout, profile: Profile, limit: float) -> tuple[Outcome, Any, list[float]]:
    settings = {"partition": "profile", "recompute": "auto", "memory_limit": limit}
    engine = start(transformer_case(Recipe(), 4), layout, profile=profile, **settings)
    outcome = train(engine, transformer_case(Recipe(), 4))
    predicted = engine.memory_report().predicted or ()
    return outcome, engine.plan, [rank.total for rank in predicted]


@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 2), Layout("zb-h1", 4), Layout("interleaved-1f1b", 2, 2), Layout("auto", 2)], ids=str
)
def test_a_limit_is_kept_to_by_recomputing_some_layers_with_the_same_bits(layout: Layout) -> None:
    profile = _measured()
    schedule = layout.build()
    partition = make_partition("profile", schedule, profile=profile)
    most, least = (
        max(rank.total for rank in predict_memory(costs, partition, schedule))
        for costs in (profile, recomputed(profile, range(LAYERS)))
    )
    limit = (most + least) / 2
    outcome, plan, predicted = everywhere(_limited, layout.ranks, layout, profile, limit)[0]
    assert 0 < len(plan.recompute) < LAYERS
    assert max(predicted) <= limit
    assert same_bits(outcome, run(transformer_case(Recipe(), 4), Layout()))


def test_a_limit_below_everything_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(OutOfMemory, match="even with all of its layers recomputed"):
        everywhere(_limited, 2, Layout("1f1b", 2), _measured(), 1000.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute": "auto"}, "keeps within memory_limit: set it too"),
        ({"memory_limit": "8GiB", "partition": "uniform"}, "must know what layers keep and cost"),
        ({"memory_limit": "much", "recompute": "auto"}, "it must be a number of bytes, or one with a unit as in 8GiB"),
        ({"memory_limit": "1GiB", "recompute": "auto", "partition": "uniform"}, "must know what layers keep and cost"),
    ],
)
def test_what_auto_needs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(transformer_case(Recipe(), 4), Layout(), **{"partition": "profile", **settings})


def test_sizes() -> None:
    for text, size in (("8GiB", 8 * 2**30), ("500MB", 5e8), (" 1.5 K", 1500.0), (2048, 2048.0), ("7", 7.0)):
        assert PipelineConfig(recompute="auto", memory_limit=text).memory_limit == size
