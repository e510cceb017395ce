"""The commands that are given a model: ``pipeloom partition`` and ``pipeloom train``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partition import Profile
from pipeline.cli import main

MODEL = '''
import torch
from torch import nn
from pipeline import LayerSpec, PipelineModule

class Tiny(PipelineModule):
    def __init__(self):
        super().__init__([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)],
                         loss_fn=nn.functional.mse_loss)

def batches():
    for i in range(12):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        yield x, x.sum(1, keepdim=True)

def nothing_left():
    return iter([])

def numbers():
    return iter([1, 2])

not_a_model = 3
'''


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The file of a model, under a name of its own, as modules are imported once."""
    path = tmp_path / f"model_{abs(hash(request.node.name))}.py"
    path.write_text(MODEL)
    return str(path)


def test_partition_lists_every_schedule_the_fastest_first(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", f"{model}:Tiny", "--ranks", "2", "--micro-batches", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["parameters"] for layer in found["profile"]["layers"]] == [20, 20, 5]
    assert all(layer["forward"] > 0 and layer["weight_grad"] > 0 for layer in found["profile"]["layers"])
    times = [option["step_time"] for option in found["schedules"]]
    assert times == sorted(times)
    assert {"1f1b", "gpipe", "interleaved-1f1b"} <= {option["schedule"] for option in found["schedules"]}
    assert all(option["cuts"][0] == 0 and option["cuts"][-1] == 3 for option in found["schedules"])
    assert all(len(option["idle"]) == 2 for option in found["schedules"])


def test_a_saved_profile_takes_the_place_of_measuring(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "profile.json")
    assert main(["partition", f"{model}:Tiny", "--ranks", "2", "--save-profile", saved, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert main(["partition", f"{model}:Tiny", "--ranks", "2", "--profile", saved, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == measured
    Profile.load(saved).model_copy(update={"speeds": (1.0, 0.5)}).save(saved)
    assert main(["partition", f"{model}:Tiny", "--ranks", "2", "--profile", saved]) == 0
    assert "speed of each rank: 1.00 0.50" in capsys.readouterr().out


def test_train_runs_to_the_end_of_the_data_and_goes_on_from_its_checkpoint(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["train", f"{model}:Tiny", "--micro-batches", "3", "--partition", "uniform", "--lr", "0.05"]
    checkpoints = ["--save-to", str(tmp_path / "checkpoints")]
    picture = tmp_path / "step.json"
    assert main([*common, *checkpoints, "--steps", "2", "--save", str(picture)]) == 0
    assert "step 2/2" in capsys.readouterr().out
    assert picture.is_file()
    assert main([*common, *checkpoints, "--resume"]) == 0
    resumed = capsys.readouterr().out
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004"  # 12 items are 4 steps
    assert "step-00000004" in resumed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}:Tinny", "--ranks", "2"], "has no 'Tinny'"),
        (["{model}", "--ranks", "2"], "write FILE:NAME"),
        (["{model}:not_a_model", "--ranks", "2"], "is a int; name a PipelineModule"),
        (["no_such_file:Tiny", "--ranks", "2"], "there is neither a file no_such_file.py nor a module"),
        (["{model}:Tiny", "--ranks", "9"], "3 layers cannot be cut for 9 ranks; set --ranks to 3 or less"),
        (["{model}:Tiny", "--ranks", "2", "--data", "{model}:nothing"], "has no 'nothing'"),
        (["{model}:Tiny", "--ranks", "2", "--data", "{model}:numbers"], "an item is a pair (inputs, targets)"),
        (["{model}:Tiny", "--ranks", "0"], "'0' is not a whole number, 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", *(argument.format(model=model) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


BAD_TRAINING = [
    (["--steps", "-1"], "'-1' is not a whole number, 1 or more"),
    (["--steps", "1", "--save", "x.pdf"], "cannot save a timeline as 'x.pdf'; let the name end in one of .html"),
    (["--steps", "1", "--save", "/nowhere/x.html"], "cannot write /nowhere/x.html: there is no folder /nowhere"),
    (["--resume"], "resume needs a folder of checkpoints: set save_to"),
    (["--data", "{model}:nothing_left"], "the data hold no micro-batch; let --data give at least one"),
    (["--data", "{model}:numbers"], "an item is a pair (inputs, targets), targets may be None; got a int"),
    (["--partition", "1,9"], "partition = (1, 9): for 1 stages of 3 layers give 0 cut points"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_TRAINING, ids=[message[:20] for _, message in BAD_TRAINING])
def test_bad_training_is_one_line_and_exit_code_2(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before anything is trained."""
    common = ["train", f"{model}:Tiny", *([] if "--partition" in arguments else ["--partition", "uniform"])]
    assert main([*common, *(argument.format(model=model) for argument in arguments)]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert not told.out


