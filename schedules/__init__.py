"""What runs when: schedules as data, checked, timed, and lowered to programs."""

from schedules import errors, library
from schedules.action import Action, Entry, Kind, Pair
from schedules.check import check
from schedules.costs import Costs
from schedules.lower import lower
from schedules.program import Instruction, Op, Program
from schedules.prove import prove
from schedules.registry import Facts, Shape, build, facts, names, schedule
from schedules.schedule import Schedule
from schedules.simulate import simulate
from schedules.timeline import Span, Timeline

__all__ = [
    "Action",
    "Costs",
    "Entry",
    "Facts",
    "Instruction",
    "Kind",
    "Op",
    "Pair",
    "Program",
    "Schedule",
    "Shape",
    "Span",
    "Timeline",
    "build",
    "check",
    "errors",
    "facts",
    "library",
    "lower",
    "names",
    "prove",
    "schedule",
    "simulate",
]
