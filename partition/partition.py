"""Where a layer list is cut."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from partition.errors import PartitionError


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive parts of a layer list: part g is the layers cuts[g] to cuts[g + 1] - 1, and may be empty.

    A part is what one stage holds, or both copies of a stage in schedules that keep two.
    """

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        cuts = tuple(int(cut) for cut in self.cuts)
        if len(cuts) < 2 or cuts[0] != 0 or list(cuts) != sorted(cuts):
            raise PartitionError(f"cuts are {cuts}: give at least two numbers that begin with 0 and never go down")
        object.__setattr__(self, "cuts", cuts)

    @property
    def parts(self) -> int:
        return len(self.cuts) - 1

    @property
    def layers(self) -> int:
        return self.cuts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each part."""
        return tuple(len(self.layers_of(part)) for part in range(self.parts))

    def layers_of(self, part: int) -> range:
        if not 0 <= part < self.parts:
            raise PartitionError(f"there is no part {part}: this partition has parts 0 to {self.parts - 1}")
        return range(self.cuts[part], self.cuts[part + 1])

    def part_of(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise PartitionError(f"there is no layer {layer}: this partition has layers 0 to {self.layers - 1}")
        return bisect_right(self.cuts, layer) - 1

    def __str__(self) -> str:
        """The layers of every part, as in 0-2 | 3 | - | 4-7."""
        return " | ".join(ranges(self.layers_of(part)) or "-" for part in range(self.parts))


def ranges(numbers: range | list[int]) -> str:
    """Rising numbers with runs written as one: 0-2, 5 for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
