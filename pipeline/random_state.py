"""Random state that depends on what is computed (seed, step, micro-batch, layer), never on where or when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.device import generator_of

_MASK = (1 << 64) - 1


def key(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """A 64-bit seed for one layer's work on one micro-batch; equal on every machine and in every version.

    Each number (any integer, taken modulo 2^64) is absorbed in turn.
    """
    return absorbed(0, seed, step, micro_batch, layer)


def absorbed(state: int, *numbers: int) -> int:
    """The state after some numbers more, by the finaliser of SplitMix64, under which every bit of the input moves about
    half of the bits of the result (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014)."""
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generator(device: torch.device, key: int) -> None:
    """Start the device's default generator from a key.

    It is set directly: `torch.manual_seed` visits every kind of device and costs hundreds of microseconds.
    A CPU's generator takes the low 32 bits of the key only. It is one for the process, so that ranks which
    are threads hold a lock while a layer draws from it.
    """
    generator_of(device).manual_seed(key)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Put the device's default generator back, at the end, to the state it has now."""
    generator = generator_of(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
