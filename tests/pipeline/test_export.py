"""The model of a checkpoint goes into a file of safetensors and back, by its own names, whatever the layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, TiedLayerSpec, initialize, run_local
from pipeline.cli import main
from pipeline.engine import Engine

ITEMS = [(torch.full((4, 8), float(i)), torch.ones(4, 8)) for i in range(4)]


def engine_of(data_parallel: int = 1, zero: int = 0) -> Engine:
    layers = [
        TiedLayerSpec("both", nn.Linear, 8, 8),
        LayerSpec(nn.BatchNorm1d, 8),
        LayerSpec(nn.Linear, 8, 8),
        TiedLayerSpec("both", nn.Linear, 8, 8),
    ]
    config = {"partition": "uniform", "micro_batches": 4 // data_parallel, "device": "cpu"}
    config |= {"data_parallel": data_parallel, "zero": zero}
    module = PipelineModule(layers, functional.mse_loss)
    return initialize(module, config=config, optimizer=partial(torch.optim.AdamW, lr=0.01))


def train_and_save(path: str, zero: int) -> dict[str, Tensor]:
    engine = engine_of(2, zero)
    engine.train_batch(iter(ITEMS))
    engine.save_checkpoint(path)
    return engine.full_state_dict()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_there_and_back(zero: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = run_local(train_and_save, 4, str(tmp_path / "runs"), zero)[0]
    file = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "runs"), str(file)]) == 0
    assert "step-00000001 into" in capsys.readouterr().out
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) and found[name].dtype == value.dtype for name, value in expected.items())

    def load() -> dict[str, Tensor]:
        engine = engine_of()
        engine.eval_batch(ITEMS)
        engine.load_full_state_dict(found)
        return engine.full_state_dict()

    again = run_local(load, 2)[0]
    assert all(again[name].equal(value) for name, value in expected.items())


def test_what_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path), str(target)]) == 2
    assert f"there is no checkpoint in {tmp_path}" in capsys.readouterr().err
    run_local(train_and_save, 2, str(tmp_path), 0)
    part = next((tmp_path / "step-00000001").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    assert main(["export", str(tmp_path), str(target)]) == 2
    assert "step-00000001 is damaged" in capsys.readouterr().err
    assert not target.exists()
