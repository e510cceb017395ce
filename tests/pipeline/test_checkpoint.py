"""Checkpoints that cannot be written, read, or used: told on every rank, before anything is changed."""

from __future__ import annotations

import json
import shutil
import warnings
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
from pipeline.errors import CheckpointError, ConfigError, TrainingWarning

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
        "'layers.2.weight' has shape (4, 4), the model needs (6, 4)",
    ),
    "a parameter more": (lambda: start(LINEAR, LINEAR, LayerSpec(nn.PReLU)), "has shape (4, 4), the model needs (1,)"),
    "a parameter less": (
        lambda: start(LayerSpec(nn.Linear, 4, 4, bias=False)),
        "it has 'layers.0.bias', and the model has not",
    ),
    "a layer without": (lambda: start(LINEAR, nn.Tanh()), "it has 'layers.1.bias', and the model has not"),
    "other names": (
        lambda: start(LayerSpec(nn.Sequential, nn.Linear(4, 4))),
        "it has no 'layers.0.0.weight'",
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


def cut_header(path: Path) -> str:
    (path / "header.pt").write_bytes(b"not whole")
    return "is damaged: header.pt has 9 bytes instead of "


def cut_tensors(path: Path) -> str:
    file = max(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    return f"is damaged: {file.name} has 100 bytes instead of "


def change_a_byte(path: Path) -> str:
    file = max(path.glob("*.distcp"))
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    return f"is damaged: {file.name} does not have the checksum that it had when written"


def lose_tensors(path: Path) -> str:
    file = max(path.glob("*.distcp"))
    file.unlink()
    return f"is damaged: {file.name} is missing"


def lose_index(path: Path) -> str:
    (path / ".metadata").unlink()
    return "is damaged: .metadata is missing"


def lose_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "is no checkpoint, or not a whole one: it has no manifest.json"


def change_manifest(path: Path) -> str:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"layers": ', '"layers": 1'))
    return "manifest.json is damaged: it does not have the checksum that it says"


def cut_manifest(path: Path) -> str:
    file = path / "manifest.json"
    file.write_text(file.read_text()[:200])
    return "manifest.json cannot be read, it is damaged"


def come_from_the_future(path: Path) -> str:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"form": 9, "version": "12.3"}))
    return "was written by pipeloom 12.3 in form 9, and this is pipeloom"


DAMAGES = [
    cut_header, cut_tensors, change_a_byte, lose_tensors, lose_index, lose_manifest, change_manifest, cut_manifest,
    come_from_the_future,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_damaged(damage: Callable[[Path], str], saved: Path, tmp_path: Path) -> None:
    """Named in one line, the same on every rank, and nothing of the model is changed."""
    path = tmp_path / "step-00000001"
    shutil.copytree(saved, path)
    message = damage(path)

    def worker() -> tuple[str, bool]:
        engine = start()
        before = engine.full_state_dict()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(path)
        after = engine.full_state_dict()
        return str(caught.value), all(after[name].equal(tensor) for name, tensor in before.items())

    for told, unchanged in run_local(worker, 2):
        assert told.startswith(str(path))
        assert message in told
        assert "\n" not in told
        assert unchanged


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_takes_the_place_of_a_damaged_one(
    damage: Callable[[Path], str], saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "step-00000001")

    def save() -> None:
        engine = start()
        engine.load_checkpoint(tmp_path)
        engine.train_batch(ITEMS)
        engine.save_checkpoint(tmp_path)

    run_local(save, 2)
    message = damage(tmp_path / "step-00000002")

    def load() -> tuple[int, list[str]]:
        engine = start()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert engine.load_checkpoint(tmp_path) == tmp_path / "step-00000001"
        return engine.steps, [str(warning.message) for warning in told if warning.category is TrainingWarning]

    [(steps, told)] = run_local(load, 1)
    assert steps == 1
    if damage is lose_manifest:
        return  # it is none, so that nothing is said of it
    [text] = told
    assert message in text
    assert text.endswith(f"going on from {tmp_path / 'step-00000001'}, the one before")


def test_a_folder_where_none_is_whole(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "step-00000001")
    message = change_a_byte(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path} is whole: .*{message}"):
        start().load_checkpoint(tmp_path)


def test_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}"):
        start().load_checkpoint(tmp_path)


def test_no_folder_at_all() -> None:
    with pytest.raises(ConfigError, match="there is no folder of checkpoints: give one, or set save_to"):
        start().save_checkpoint()


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
    assert results[0][0].startswith(f"cannot write the checkpoint {tmp_path / 'file' / 'step-00000000'}: ")
