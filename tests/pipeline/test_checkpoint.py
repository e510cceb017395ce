"""Checkpoints that cannot be written, read, or used: told on every rank, before anything is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline import LayerSpec, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.engine import Engine
from pipeline.errors import CheckpointError

ITEMS = [Item(torch.full((2, 4), float(i)), torch.ones(2, 4)) for i in range(4)]
LINEAR = LayerSpec(nn.Linear, 4, 4)
DESCENT = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def start(*layers: Any, optimizer: Any = DESCENT, **others: Any) -> Engine:
    module = PipelineModule([*layers, *[LINEAR] * (4 - len(layers))], functional.mse_loss)
    config = {"partition": "uniform", "micro_batches": 4, "device": "cpu"}
    return initialize(module, config=config, optimizer=optimizer, **others)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four linear layers after one step."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def worker() -> Path:
        engine = start()
        engine.train_batch(ITEMS)
        return engine.save_checkpoint(folder)

    return run_local(worker, 2)[0]


def per_kind(name: str, shape: torch.Size) -> dict[str, Any]:
    return {"lr": 0.1 if "bias" in name else 0.2}


STRANGERS: dict[str, tuple[Callable[[], Engine], str]] = {
    "shapes on the last rank": (
        lambda: start(LINEAR, LINEAR, LayerSpec(nn.Linear, 4, 6), LayerSpec(nn.Linear, 6, 4)),
        "model.layers.2.weight has shape (4, 4), the model needs (6, 4)",
    ),
    "a parameter more": (lambda: start(LINEAR, LINEAR, LayerSpec(nn.PReLU)), "has shape (4, 4), the model needs (1,)"),
    "a parameter less": (
        lambda: start(LayerSpec(nn.Linear, 4, 4, bias=False)),
        "it has 'model.layers.0.bias', and the model has not",
    ),
    "a layer without": (lambda: start(LINEAR, nn.Tanh()), "it has 'model.layers.1.bias', and the model has not"),
    "other names": (
        lambda: start(LayerSpec(nn.Sequential, nn.Linear(4, 4))),
        "it has no 'model.layers.0.0.weight'",
    ),
    "another optimizer": (lambda: start(optimizer=torch.optim.AdamW), "it goes on with SGD, not AdamW"),
    "other groups": (lambda: start(param_groups=per_kind), "its optimizer has 1 parameter groups, this one 2"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_checkpoint_of_another_model_or_optimizer(name: str, saved: Path) -> None:
    make, message = STRANGERS[name]

    def worker() -> tuple[str, bool, float]:
        torch.manual_seed(0)
        engine = make()
        before = engine.full_state_dict()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(saved)
        after = engine.full_state_dict()
        unchanged = engine.steps == 0 and all(after[name].equal(tensor) for name, tensor in before.items())
        return str(caught.value), unchanged, engine.train_batch(ITEMS).item()

    results = run_local(worker, 2)
    assert len(set(results)) == 1
    told, unchanged, _ = results[0]
    assert told.startswith(f"{saved} does not fit: ")
    assert message in told
    assert unchanged


def cut_header(path: Path) -> None:
    (path / "header.pt").write_bytes(b"not whole")


def cut_tensors(path: Path) -> None:
    for file in path.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])


def lose_index(path: Path) -> None:
    (path / ".metadata").unlink()


@pytest.mark.parametrize("damage", [cut_header, cut_tensors, lose_index])
def test_a_checkpoint_that_is_damaged(damage: Callable[[Path], None], saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved, path)
    damage(path)

    def worker() -> str:
        with pytest.raises(CheckpointError) as caught:
            start().load_checkpoint(path)
        return str(caught.value)

    for told in run_local(worker, 2):
        assert told.startswith(f"{path} cannot be read, it is damaged or not whole: ")
        assert "\n" not in told


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Told on all ranks, which go on together."""
    (tmp_path / "file").write_text("")

    def worker() -> tuple[str, float]:
        engine = start()
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(tmp_path / "file")
        return str(caught.value), engine.train_batch(ITEMS).item()

    results = run_local(worker, 2)
    assert len(set(results)) == 1
    assert results[0][0].startswith(f"cannot write a checkpoint into {tmp_path / 'file'}: ")
