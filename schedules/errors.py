"""The errors of schedules: one tree, so that a caller can catch all of them as ScheduleError."""

from __future__ import annotations


class ScheduleError(ValueError):
    """Something about a schedule, its costs or its program is wrong; the message says what to change."""


class UnknownSchedule(ScheduleError):
    """No schedule has this name; the message names the nearest ones that exist."""


class ImpossibleShape(ScheduleError):
    """The schedule exists, but not for this shape; the message names the nearest numbers that work."""


class UnknownOption(ScheduleError):
    """The schedule has no option of this name."""


class DuplicateSchedule(ScheduleError):
    """Two schedules want the same name."""


class IllegalSchedule(ScheduleError):
    """An action is missing, doubled, on the wrong rank, or runs before what it needs."""


class DeadlockError(IllegalSchedule):
    """Ranks wait for each other in a circle; the message prints the circle."""


class IllegalProgram(ScheduleError):
    """A program does not do what its schedule says, or sends what nobody takes in."""


class CostError(ScheduleError):
    """A cost is negative, not finite, or not given for every stage."""


class StampError(ScheduleError):
    """A measured timeline's stamps do not belong to the rows of its schedule."""


class UnreadableSchedule(ScheduleError):
    """A file or a text does not describe a schedule; the message names the place."""


class UnknownFormat(ScheduleError):
    """A timeline cannot be saved under a name that ends like this."""


class MissingLibrary(ScheduleError):
    """A view needs a library that is not installed; the message names the extra that brings it."""
