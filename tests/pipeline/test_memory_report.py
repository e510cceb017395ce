"""Memory told by rank: what was predicted without ranks is what ranks predict, and what grows has a name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partition import LayerCost, Profile, RankMemory
from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.cli import main
from pipeline.errors import StateError
from pipeline.memory import Held, MemoryReport
from tests.pipeline.running import everywhere

WIDTH, ROWS, MICRO_BATCHES = 8, 4, 3


class Keeps(nn.Module):
    """A layer that puts its outputs somewhere, and forgets them there."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.outputs: list[Tensor] = []
        self.by_call: dict[int, tuple[Tensor, str]] = {}
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.where == "list":
            self.outputs.append(y.detach().clone())
        elif self.where == "nested":
            self.by_call[len(self.by_call)] = (y.detach().clone(), "for later")
        return y


def report(where: str) -> MemoryReport:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Tanh), LayerSpec(Keeps, where), torch.tanh]
    module = PipelineModule(layers, functional.mse_loss)
    engine = initialize(
        module,
        config={"micro_batches": MICRO_BATCHES, "partition": "uniform"},
        optimizer=partial(torch.optim.AdamW, foreach=False),
    )
    items = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))] * MICRO_BATCHES
    for _ in range(8):
        engine.train_batch(iter(items))
        if engine.steps == 3:
            engine.memory_report()
    return engine.memory_report(since=3)


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("where", ["list", "nested"])
def test_a_layer_that_keeps_its_outputs_is_named(where: str, processes: bool) -> None:
    kept = 5.0 * MICRO_BATCHES * ROWS * WIDTH * 4
    for found in everywhere(report, 2, where, processes=processes):
        assert found.grown == {"layer 2 (Keeps)": kept}
        assert str(found).splitlines()[-1] == "since step 3: layer 2 (Keeps) keeps 1.9 KiB more"


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_of_healthy_layers_nothing_grows(processes: bool) -> None:
    for found in everywhere(report, 2, "nowhere", processes=processes):
        assert found.grown == {}
        assert str(found).splitlines()[-1] == "since step 3: nothing has grown"


def test_a_tensor_kept_in_a_closure_belongs_to_the_layer() -> None:
    kept: list[Tensor] = []

    def remembers(x: Tensor) -> Tensor:
        kept.append(x.detach().clone())
        return x

    def grown() -> Any:
        module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH), remembers], functional.mse_loss)
        engine = initialize(module, config={"micro_batches": 1, "partition": "uniform"}, optimizer=torch.optim.SGD)
        for _ in range(3):
            engine.train_batch(iter([(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))]))
            if engine.steps == 1:
                engine.memory_report()
        return engine.memory_report(since=1).grown

    assert grown() == {"layer 1 (remembers)": 2.0 * ROWS * WIDTH * 4}


def test_growth_since_a_step_at_which_nobody_looked_is_refused() -> None:
    module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH)], functional.mse_loss)
    engine = initialize(module, config={"partition": "uniform"}, optimizer=torch.optim.SGD)
    engine.memory_report()
    with pytest.raises(StateError, match="not called after step 7, with which to compare; it was after: 0"):
        engine.memory_report(since=7)


# -- pipeloom memory -----------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from pipeline import LayerSpec, PipelineModule

def model():
    return PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(6)], nn.functional.mse_loss)

def batches():
    while True:
        yield torch.ones(4, 8), torch.zeros(4, 8)
"""
COST = LayerCost(
    name="l",
    type="Linear",
    forward=1.0,
    input_grad=1.0,
    weight_grad=1.0,
    activation_bytes=256,
    output_bytes=128,
    parameters=72,
    parameter_bytes=288,
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, Path]:
    """A model of six layers, and a profile of it."""
    model, profile = tmp_path / "six_layers.py", tmp_path / "profile.json"
    model.write_text(MODEL)
    Profile(layers=(COST,) * 6).save(profile)
    return f"{model}:model", profile


SETTINGS = {"schedule": "zb-h1", "data_parallel": 2, "micro_batches": 4, "zero": 3}


def predicted_by_ranks(profile: Profile) -> tuple[RankMemory, ...] | None:
    module = PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(6)], functional.mse_loss)
    engine = initialize(module, config=SETTINGS, optimizer=torch.optim.AdamW, profile=profile)
    return engine.memory_report().predicted


def test_the_command_predicts_what_ranks_predict(
    files: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, profile = files
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    assert main(["memory", model, "--ranks", "4", "--profile", str(profile), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cuts"] == [0, 3, 6]
    expected = run_local(predicted_by_ranks, 4, Profile.load(profile))[0]
    assert expected is not None
    assert found["ranks"] == [{**rank._asdict(), "total": rank.total} for rank in expected]
    first = found["ranks"][0]
    assert (first["parameters"], first["gradients"], first["optimizer"]) == (3 * 144, 3 * 144, 3 * 288)
    assert first["whole"] == 3 * 288  # two layers of parameters, and one of gradients
    assert first["total"] == sum(value for name, value in first.items() if name != "total")


def test_the_command_measures_and_marks_the_fullest_rank(
    files: tuple[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "measured.json"
    assert main(["memory", files[0], "--ranks", "2", "--partition", "0,4,6", "--save-profile", str(saved)]) == 0
    text = capsys.readouterr().out
    assert [line.rstrip().endswith("*") for line in text.splitlines()[2:4]] == [True, False]
    assert "0-3 | 4-5" in text
    assert sum(layer.parameters for layer in Profile.load(saved).layers) == 6 * 72


def test_the_command_refuses_ranks_that_do_not_fit(
    files: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", files[0], "--ranks", "3", "--data-parallel", "2"]) == 2
    assert "3 ranks cannot form 2 pipelines" in capsys.readouterr().err


def test_the_report_marks_the_fullest_rank_and_puts_predictions_in_brackets() -> None:
    said = RankMemory(2048.0, 1024.0, 1024.0, 0.0, 4096.0, 1024.0, 1024.0)
    lines = str(MemoryReport((Held(1024, 0, 0, 0), Held(2048, 0, 0, 0)), (said, said))).splitlines()
    assert lines[1].split() == [
        "0", "1.0", "KiB", "(2.0", "KiB)", "0", "B", "(1.0", "KiB)", "0", "B", "(1.0", "KiB)", "0", "B", "(0", "B)",
        "(6.0", "KiB)", "1.0", "KiB", "(10.0", "KiB)",
    ]  # fmt: skip
    assert not lines[1].endswith("*")
    assert lines[2].endswith(" *")
