"""The key of a random state is a pure function of integers, and the generator can be set and put back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.random_state import key, preserved, seed_generator

CPU = torch.device("cpu")
integers = st.integers(0, 2**40)


def test_keys_never_change_between_versions() -> None:
    assert key(0, 0, 0, 0) == 0x2130748AAAC80268
    assert key(1, 2, 3, 4) == 0x336C3255CBCC01FE
    assert key(-1, 0, 0, 0) == key(2**64 - 1, 0, 0, 0)


@given(st.tuples(integers, integers, integers, integers), st.integers(0, 3), st.integers(0, 39))
def test_one_bit_of_one_number_moves_many_bits_of_the_key(
    numbers: tuple[int, ...], at: int, bit: int
) -> None:
    other = list(numbers)
    other[at] ^= 1 << bit
    difference = key(*numbers) ^ key(*other)
    assert 8 <= difference.bit_count() <= 56


def test_keys_of_a_whole_run_are_distinct() -> None:
    keys = {key(s, t, m, y) for s in range(4) for t in range(20) for m in range(20) for y in range(20)}
    assert len(keys) == 4 * 20 * 20 * 20


def test_a_seeded_generator_draws_the_same_numbers() -> None:
    draws = []
    for number in (5, 6, 5):
        seed_generator(CPU, key(0, 0, 0, number))
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_a_key_of_64_bits_is_accepted() -> None:
    for number in (2**64 - 1, 2**63, 0):
        seed_generator(CPU, number)


def test_preserved_puts_the_state_back_after_an_error() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    try:
        with preserved(CPU):
            seed_generator(CPU, 99)
            torch.rand(7)
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.equal(torch.rand(3), expected)
