"""Profiles made up for tests."""

from collections.abc import Callable, Sequence

import pytest

from partition import LayerCost, Profile

MakeProfile = Callable[..., Profile]


@pytest.fixture
def make_profile() -> MakeProfile:
    """A profile of layers with these forwards; I and W take as long, sizes are the same for all unless given."""

    def make(forward: Sequence[float], *, types: Sequence[str] = (), hop: float = 0.0, **same: int) -> Profile:
        return Profile(
            layers=tuple(
                LayerCost(
                    name=f"layers.{index}",
                    type=types[index] if types else "Block",
                    forward=seconds,
                    input_grad=seconds,
                    weight_grad=seconds,
                    **same,
                )
                for index, seconds in enumerate(forward)
            ),
            hop=hop,
        )

    return make
