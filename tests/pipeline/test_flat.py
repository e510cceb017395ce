"""A layer's parameters and gradients are views of vectors, and stay so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.errors import GradientError
from pipeline.gradients import FlatLayer
from pipeline.gradients.flat import ALIGNMENT, FROZEN


class Bag(nn.Module):
    """Parameters of any form."""

    def __init__(self, *parameters: Tensor, trainable: tuple[bool, ...] = ()) -> None:
        super().__init__()
        wanted = trainable or (True,) * len(parameters)
        self.values = nn.ParameterList(
            nn.Parameter(value, requires_grad=needs) for value, needs in zip(parameters, wanted, strict=True)
        )


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
members = st.lists(
    st.tuples(
        shapes, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans(), st.integers(0, 2)
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(members)
def test_any_layer_lies_in_vectors(members: list[tuple[tuple[int, ...], torch.dtype, bool, int]]) -> None:
    module = Bag(
        *(torch.randn(shape).to(dtype) for shape, dtype, _, _ in members), trainable=tuple(m[2] for m in members)
    )
    before = [p.detach().clone() for p in module.values]
    groups = {f"values.{i}": member[3] for i, member in enumerate(members)}
    flat = FlatLayer(module, group_of=lambda name, parameter: groups[name])
    flat.check_gradients()
    taken: dict[int, set[int]] = {}
    for slot, parameter, value, (shape, dtype, trainable, group) in zip(
        flat.slots, module.values, before, members, strict=True
    ):
        vector = flat.vectors[slot.vector]
        assert torch.equal(parameter, value)
        assert (slot.shape, parameter.dtype, slot.numel) == (torch.Size(shape), dtype, value.numel())
        assert slot.offset * dtype.itemsize % ALIGNMENT == 0
        assert vector.parameters[slot.offset : slot.end].view(shape).data_ptr() == parameter.data_ptr()
        assert slot.group == (group if trainable else FROZEN)
        assert taken.setdefault(slot.vector, set()).isdisjoint(range(slot.offset, slot.end))
        taken[slot.vector].update(range(slot.offset, slot.end))
        assert (flat.gradient_of(parameter) is not None) == trainable
        if trainable:
            assert slot.end <= len(vector.gradients)
            assert vector.gradients.dtype == torch.promote_types(dtype, torch.float32)
    for segment in flat.segments:
        inside = [s for s in flat.slots if s.vector == segment.vector and segment.start <= s.offset < segment.stop]
        assert {slot.group for slot in inside if slot.numel} <= {segment.group}
    padding = sum(int((v.parameters != 0).sum()) for v in flat.vectors)
    assert padding <= sum(p.numel() for p in module.values)


def test_names_offsets_and_segments() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    module[2].weight.requires_grad_(False)
    flat = FlatLayer(module, group_of=lambda name, parameter: int(parameter.dim() < 2))
    assert [(slot.name, slot.offset, slot.group) for slot in flat.slots] == [
        ("0.weight", 0, 0),
        ("0.bias", 16, 1),
        ("1.weight", 32, 1),
        ("1.bias", 48, 1),
        ("2.weight", 0, FROZEN),
        ("2.bias", 64, 1),
    ]
    assert [(s.group, s.start, s.stop) for s in flat.segments] == [(0, 0, 6), (1, 16, 66)]
    assert [(len(v.parameters), len(v.gradients)) for v in flat.vectors] == [(80, 80), (16, 0)]
    cut = FlatLayer(nn.Linear(3, 2), sort_of=lambda name, parameter: parameter.dim(), parts=3)
    assert [(len(v.parameters), v.sort) for v in cut.vectors] == [(48, 2), (48, 1)]  # three times a cache line


def test_autograd_accumulates_in_place() -> None:
    module = nn.Linear(3, 2)
    flat = FlatLayer(module)
    for _ in range(3):
        module(torch.ones(4, 3)).sum().backward()
    assert torch.equal(flat.gradients()["weight"], torch.full((2, 3), 12.0))
    assert module.weight.grad is flat.preset_of(module.weight)
    assert float(flat.vectors[0].gradients.sum()) == 72 + 24
    flat.zero_gradients()
    assert not module.bias.grad.any()
    flat.check_gradients()


def test_gradients_of_half_precision_accumulate_in_single_precision() -> None:
    module = nn.Linear(1, 1, bias=False).bfloat16()
    flat = FlatLayer(module)
    for step in range(300):
        module(torch.full((1, 1), 1.0 if step == 0 else 2.0**-9, dtype=torch.bfloat16)).sum().backward()
        assert module.weight.grad is None
    assert flat.gradients()["weight"].item() == 1 + 299 * 2.0**-9  # bfloat16 would have stayed at 1
    flat.check_gradients()


def test_accumulation_may_be_wider_still() -> None:
    flat = FlatLayer(nn.Linear(2, 2), accumulate_dtype=torch.float64)
    assert flat.vectors[0].gradients.dtype == torch.float64
    assert FlatLayer(nn.Linear(2, 2).double()).vectors[0].gradients.dtype == torch.float64


def test_a_parameter_under_two_names_is_one_slot() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    flat = FlatLayer(module)
    assert [slot.name for slot in flat.slots] == ["0.weight", "0.bias", "1.bias"]
    module(torch.ones(1, 2)).sum().backward()
    flat.check_gradients()


def test_optimizing_the_vectors_trains_the_module() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module, x = copy.deepcopy(plain), torch.randn(5, 3)
    flat = FlatLayer(module)
    stretches = [(flat.vectors[s.vector], slice(s.start, s.stop)) for s in flat.segments]
    shards = [nn.Parameter(vector.parameters[own]) for vector, own in stretches]
    for shard, (vector, own) in zip(shards, stretches, strict=True):
        shard.grad = vector.gradients[own]
    mine = torch.optim.AdamW(shards, lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        theirs.zero_grad()
        plain(x).square().sum().backward()
        theirs.step()
        flat.zero_gradients()
        module(x).square().sum().backward()
        mine.step()
    for own, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def set_grad(module: nn.Linear) -> None:
    module.weight.grad = torch.zeros(2, 2)


def set_data(module: nn.Linear) -> None:
    module.weight.data = torch.zeros(2, 2)


def set_parameter(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nn.Module.zero_grad, r"gradient of '0\.weight' was replaced \(now None\)"),
        (lambda m: set_grad(m[0]), r"gradient of '0\.weight' was replaced \(now a torch.float32 tensor"),
        (lambda m: set_data(m[0]), r"values of '0\.weight' were replaced"),
        (lambda m: set_parameter(m[0]), r"parameter '0\.weight' was replaced"),
        (lambda m: nn.utils.parametrizations.weight_norm(m[0]), r"parameter '0\.weight' was replaced"),
    ],
)
def test_what_is_replaced_is_an_error_that_names_the_parameter(
    change: Callable[[nn.Module], object], message: str
) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    flat = FlatLayer(module)
    module.zero_grad(set_to_none=False)
    module[0].weight.grad.mul_(2)
    flat.check_gradients()
    change(module)
    with pytest.raises(GradientError, match=message):
        flat.check_gradients()
