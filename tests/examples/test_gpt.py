"""The model of the main example, from the command line and by its parts."""

from __future__ import annotations

import gpt
import pytest
import torch

from pipeline.cli import main
from tests.examples.launch import EXAMPLES


def test_attention_sees_the_past_only() -> None:
    torch.manual_seed(0)
    layer = gpt.Attention(dim=16, heads=2)
    torch.nn.init.normal_(layer.out.weight)
    x = torch.randn(2, 6, 16)
    changed = x.clone()
    changed[:, 4:] = 0
    assert torch.equal(layer(x)[:, :4], layer(changed)[:, :4])


def test_products_of_rotated_vectors_depend_on_their_distance_only() -> None:
    torch.manual_seed(0)
    q, k = (gpt.rotated(torch.randn(8).expand(10, 8).double()) for _ in range(2))
    products = q @ k.T
    for distance in range(-9, 10):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal))
    assert products[0].unique().numel() == 10


def test_a_cut_may_fall_inside_of_a_block() -> None:
    module = gpt.GPT(layers=2, dim=16, heads=2)
    types = [module.type_of(index) for index in range(len(module))]
    assert types == ["embedding", "Attention", "MLP", "Attention", "MLP", "LayerNorm", "embedding"]
    assert [tuple(use.layer for use in tie.uses) for tie in module.ties()] == [(0, 6)]


@pytest.mark.parametrize(
    ("command", "option", "value", "expected"),
    [("partition", "--ranks", "4", "Attention"), ("train", "--steps", "2", "step 2/2  loss ")],
)
def test_the_command_line_finds_model_and_data(
    command: str, option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(EXAMPLES / "gpt.py:GPT"), option, value]) == 0
    assert expected in capsys.readouterr().out
