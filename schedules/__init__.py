"""What runs when: schedules as data, checked, timed, and lowered to programs."""

from schedules import errors
from schedules.action import Action, Entry, Kind, Pair
from schedules.costs import Costs
from schedules.schedule import Schedule
from schedules.timeline import Span, Timeline

__all__ = ["Action", "Costs", "Entry", "Kind", "Pair", "Schedule", "Span", "Timeline", "errors"]
