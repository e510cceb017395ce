"""The main example: it learns, reports, stops when asked to, and goes on to the same bits."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import corpus
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.examples.launch import finish, output_of, start

SETTINGS = {"layers": 2, "dim": 16, "heads": 2, "seq": 16, "rows": 1, "steps": 30, "sample": 5}
TINY = tuple(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value)))
"""Settings with which a step takes milliseconds."""


def tensors(folder: Path) -> dict[str, Tensor]:
    """Parameters and optimizer state in the latest checkpoint of a folder, by name."""
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / (folder / "latest").read_text(), whole)
    return torch.load(whole)


def stopped_early(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Send SIGINT when the first line of progress has been written, and wait for the end."""
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, output, errors = finish(process)
    return code, first + output, errors


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a run on two ranks from beginning to end."""
    folder = tmp_path_factory.mktemp("complete")
    return folder, output_of("train_gpt.py", *TINY, "--output", str(folder), ranks=2)


def test_it_shows_progress_the_loss_and_a_sample(complete: tuple[Path, str]) -> None:
    _, output = complete
    steps = re.findall(r"^step (\d+)/30  loss ([\d.]+)  .*bubble [\d.]+ %$", output, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(1, 31))
    assert re.search(r"^step 30/30 .* [\d,]+ tokens/s  ", output, re.MULTILINE)
    first, last = float(steps[0][1]), float(steps[-1][1])
    assert 5.0 < first < 6.5
    assert last < first - 0.7
    [held_out] = re.findall(r"^eval loss: ([\d.]+) nats/byte$", output, re.MULTILINE)
    assert float(held_out) == pytest.approx(last, abs=0.5)
    assert re.search(r"nats/byte\nThe .", output)


def test_it_sets_prediction_and_measurement_side_by_side(complete: tuple[Path, str]) -> None:
    folder, output = complete
    for name in ("step", "bubble, rank 0", "bubble, rank 1", "bubble, mean"):
        assert re.search(rf"│ {name} +│ +[\d.]+ \S+ │ +[\d.]+ \S+ │ +[+-][\d.]+ \S+ │", output)
    assert "The measured step takes" in output
    assert f"every bubble with its cause: {folder / 'bubbles.html'}" in output
    page = (folder / "bubbles.html").read_text()
    assert "predicted" in page
    assert "measured" in page


def test_interrupted_on_two_ranks_and_resumed_on_one_it_ends_with_the_same_bits(
    complete: tuple[Path, str], tmp_path: Path
) -> None:
    arguments = (*TINY, "--output", str(tmp_path))
    code, output, errors = stopped_early(start("train_gpt.py", *arguments, ranks=2))
    assert code == 1, errors  # torchrun's own
    assert "SignalException" in errors
    assert "[rank" not in errors, "a rank failed"
    [step] = re.findall(r"stopped after step (\d+), wrote .*step-0+\1; go on with --resume", output)
    assert 0 < int(step) < 30
    assert "eval loss" not in output

    resumed = output_of("train_gpt.py", *arguments, "--resume")
    assert re.findall(r"eval loss: .*", resumed) == re.findall(r"eval loss: .*", complete[1])
    ours, theirs = tensors(tmp_path), tensors(complete[0])
    assert sorted(ours) == sorted(theirs)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []


def test_one_process_exits_with_0_on_ctrl_c(tmp_path: Path) -> None:
    code, output, errors = stopped_early(start("train_gpt.py", *TINY, "--output", str(tmp_path)))
    assert (code, errors) == (0, "")
    assert "go on with --resume" in output


def test_a_file_of_ones_own_and_another_schedule(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefgh" * 500)
    arguments = ("--data", str(text), "--output", str(tmp_path))
    output = output_of("train_gpt.py", *TINY, *arguments, "--schedule", "gpipe", "--micro-batches", "3")
    assert float(re.findall(r"eval loss: ([\d.]+)", output)[0]) < 4.5
    assert "gpipe" in output


def test_a_mistyped_schedule_is_one_line() -> None:
    code, output, errors = finish(start("train_gpt.py", "--schedule", "1f2b"))
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith("train_gpt.py: ")
    assert "1f1b" in errors


# -- the text ------------------------------------------------------------------------------------------------


def test_nothing_that_is_held_out_is_trained_on() -> None:
    text = corpus.load(None)
    held_out = set(bytes(text.held_out.tolist()).split(b"\n\n"))
    assert held_out.isdisjoint(bytes(text.train.tolist()).split(b"\n\n"))
    assert len(text.train) > 200_000
    assert len(text.held_out) > 20_000


def test_a_file_keeps_its_order_and_holds_out_its_end(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(20)))
    text = corpus.load(file)
    assert text.train.tolist() == list(range(18))
    assert text.held_out.tolist() == [18, 19]


def test_windows_depend_on_the_seed_alone() -> None:
    text = torch.arange(1000)
    before = torch.get_rng_state()

    def draw(seed: int) -> list[list[int]]:
        windows = corpus.random_windows(text, length=5, rows=2, seed=seed)
        return [next(windows)[0].flatten().tolist() for _ in range(3)]

    assert draw(1) == draw(1) != draw(2)
    inputs, targets = next(corpus.random_windows(text, length=5, rows=2, seed=1))
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_all_windows_cover_the_text_once() -> None:
    items = corpus.all_windows(torch.arange(24), length=5, rows=2)
    assert [inputs.flatten().tolist() for inputs, _ in items] == [list(range(10)), list(range(10, 20))]
    assert [targets.flatten().tolist() for _, targets in items] == [list(range(1, 11)), list(range(11, 21))]
