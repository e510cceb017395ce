"""The example with the user's own model: few lines change, and no loss does."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from itertools import islice

import bring_your_model as example
import pytest
import torch

from pipeline import run_local
from tests.examples.launch import EXAMPLES, output_of


def changed_lines() -> list[str]:
    """What a diff of the two loops shows, with the import that one of them needs."""
    before, after = (inspect.getsource(loop).splitlines()[1:] for loop in (example.plain, example.piped))
    source = inspect.getsource(example).splitlines()
    imports = [line for line in source if line.startswith("from pipeline import")]
    diff = difflib.unified_diff(before, [*imports, *after], lineterm="", n=0)
    return [line for line in diff if line[0] in "+-" and line[:3] not in ("+++", "---")]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_loop_changes_in_at_most_8_lines() -> None:
    assert 0 < len(changed_lines()) <= 8


def test_the_readme_shows_these_lines() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = readme.split("```diff\n")[1].split("```")[0].splitlines()
    assert sorted(line for line in shown if line[:1] in ("+", "-")) == sorted(changed_lines())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_of_all_steps_are_those_of_plain_pytorch(ranks: int, double: None) -> None:
    batches = list(islice(example.digits(), 20))  # the 18th has 97 rows
    expected = example.plain(example.network(), batches)
    model = example.network()  # not in the workers, which share one random generator
    for losses in run_local(lambda: example.piped(model, batches), ranks=ranks):
        assert losses == pytest.approx(expected, rel=1e-12, abs=0)


def test_the_first_loss_in_single_precision() -> None:
    batches = list(islice(example.digits(), 1))
    expected = example.plain(example.network(), batches)
    assert example.piped(example.network(), batches) == pytest.approx(expected, rel=1e-6)


def test_it_runs_under_torchrun() -> None:
    plain, piped, difference = output_of("bring_your_model.py", ranks=2).splitlines()
    assert plain.startswith("plain: loss 2.336372 at the first step, 0.27")
    assert piped.startswith("piped: loss 2.336372 at the first step, 0.27")
    assert float(difference.split(": ")[1]) < 1e-5
