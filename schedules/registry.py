"""Schedules by name: the decorator that declares one, and ``build`` which makes, checks and returns it."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from schedules.check import check
from schedules.errors import DuplicateSchedule, ImpossibleShape, UnknownOption, UnknownSchedule
from schedules.placement import Placement, PlacementRule, line
from schedules.schedule import Schedule
from schedules.table import Row

ENTRY_POINTS = "pipeloom.schedules"
"""The entry point group in which a package names the module that holds its ``@schedule`` functions."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule function is given."""

    ranks: int
    micro_batches: int
    stages_per_rank: int
    placement: Placement

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank in increasing order."""
        return self.placement.stages_of_rank(rank)


class Stages(NamedTuple):
    """How many stages a rank may hold."""

    default: int = 1
    least: int = 1
    most: int | None = None

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} or more"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"

    def allow(self, number: int) -> bool:
        """Whether a rank may hold this many."""
        return self.least <= number and (self.most is None or number <= self.most)


class Numbers(NamedTuple):
    """Which numbers of micro-batches, or of ranks, there is an order for."""

    text: str
    """How to say it: "the schedule needs {text}"."""
    allow: Callable[[int, int, int], bool]
    """Whether ranks, stages per rank and micro-batches go together."""


CHOSEN = 0
"""The default number of stages a rank, and ``Shape.stages_per_rank``, where the schedule itself chooses."""

ONE = Stages(1, 1, 1)
ANY_NUMBER = Numbers("any number of micro-batches", lambda ranks, stages_per_rank, micro_batches: True)
ANY_RANKS = Numbers("any number of ranks", lambda ranks, stages_per_rank, micro_batches: True)
EVEN_RANKS = Numbers("an even number of ranks", lambda ranks, stages_per_rank, micro_batches: ranks % 2 == 0)

Peak = Callable[[int, int, int], float]
Order = Callable[..., Iterable[Row] | Schedule]
OrderT = TypeVar("OrderT", bound=Order)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is declared about a schedule. Error messages, tables and the command line all read it here."""

    name: str
    doc: str
    """One line: what it is."""
    picture: str
    """The docstring of the file that defines it, which draws it."""
    aliases: tuple[str, ...]
    placement: str
    stages_per_rank: Stages
    ranks: Numbers
    micro_batches: Numbers
    splits_backward: bool
    peak: Peak
    """The most activations a rank holds, in micro-batches of its whole share: f(ranks, stages per rank,
    micro-batches). Orders never exceed it."""
    options: Mapping[str, object]
    """What ``build`` takes beside the shape, with defaults."""
    with_more_stages: str | None
    """The schedule to use for more stages a rank than this one can have."""
    chooses: bool
    """Whether it chooses among other schedules."""
    place: PlacementRule = field(repr=False)
    order: Order = field(repr=False)


_FACTS: dict[str, Facts] = {}
_NAME_OF: dict[str, str] = {}  # names and aliases, as _key writes them


def schedule(
    name: str,
    *,
    peak: Peak,
    placement: PlacementRule = line,
    stages_per_rank: Stages = ONE,
    ranks: Numbers = ANY_RANKS,
    micro_batches: Numbers = ANY_NUMBER,
    splits_backward: bool = False,
    with_more_stages: str | None = None,
    chooses: bool = False,
    aliases: tuple[str, ...] = (),
) -> Callable[[OrderT], OrderT]:
    """Declare a schedule: the decorated function gives one row a rank, as tables or as actions.

        @schedule("one-at-a-time", peak=lambda ranks, stages_per_rank, micro_batches: 1)
        def one_at_a_time(shape):
            \"\"\"A micro-batch passes forward and backward before the next one starts.\"\"\"
            for rank in range(shape.ranks):
                yield [Action(rank, kind, m) for m in range(shape.micro_batches) for kind in (Kind.F, Kind.B)]

    A function that chooses the placement itself gives a whole Schedule.

    Its keyword-only parameters become options of ``build``; the first line of its docstring describes it.
    Raises DuplicateSchedule when the name or an alias is taken.
    """

    def declare(order: OrderT) -> OrderT:
        module = sys.modules[order.__module__]
        keywords = inspect.signature(order).parameters.values()
        facts = Facts(
            name=name,
            doc=(inspect.getdoc(order) or "").partition("\n")[0],
            picture=inspect.getdoc(module) or "",
            aliases=aliases,
            placement=placement.__name__,
            stages_per_rank=stages_per_rank,
            ranks=ranks,
            micro_batches=micro_batches,
            splits_backward=splits_backward,
            peak=peak,
            options=MappingProxyType({p.name: p.default for p in keywords if p.kind is p.KEYWORD_ONLY}),
            with_more_stages=with_more_stages,
            chooses=chooses,
            place=placement,
            order=order,
        )
        _register(facts)
        return order

    return declare


def build(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None = None,
    **options: object,
) -> Schedule:
    """The schedule of this name for this shape, checked.

    ``stages_per_rank`` is the schedule's own default unless given. Raises UnknownSchedule, ImpossibleShape or
    UnknownOption; IllegalSchedule if the schedule's function makes an order that cannot run.
    """
    known = facts(name)
    if stages_per_rank is None:
        stages_per_rank = known.stages_per_rank.default
    _check_shape(known, ranks, stages_per_rank, micro_batches)
    _check_options(known, options)
    placement = known.place(ranks, stages_per_rank or 1)
    made = known.order(Shape(ranks, micro_batches, stages_per_rank, placement), **options)
    if not isinstance(made, Schedule):
        made = Schedule.from_rows(
            known.name,
            made,
            placement.rank_of_stage,
            routes=placement.routes,
            layer_group_of_stage=placement.layer_group_of_stage,
            micro_batches=micro_batches,
        )
    check(made)
    return made


def names() -> tuple[str, ...]:
    """The names of all schedules in alphabetical order, those of other packages among them."""
    _load_entry_points()
    return tuple(sorted(_FACTS))


def facts(name: str) -> Facts:
    """What is declared about a schedule, by its name or an alias. Raises UnknownSchedule."""
    if _key(name) not in _NAME_OF:
        _load_entry_points()
    try:
        return _FACTS[_NAME_OF[_key(name)]]
    except KeyError:
        near = difflib.get_close_matches(_key(name), _NAME_OF, n=3, cutoff=0.5)
        suggestions = list(dict.fromkeys(_NAME_OF[match] for match in near))
        hint = f"did you mean {' or '.join(map(repr, suggestions))}? Otherwise " if suggestions else ""
        raise UnknownSchedule(
            f"there is no schedule {name!r}; {hint}set schedule to one of: {', '.join(names())}"
        ) from None


def _register(facts: Facts) -> None:
    keys = [_key(name) for name in (facts.name, *facts.aliases)]
    for key in keys:
        owner = _FACTS.get(_NAME_OF.get(key, ""))
        if owner is not None and _origin(owner.order) != _origin(facts.order):
            raise DuplicateSchedule(
                f"{facts.name!r} of {facts.order.__module__} is already taken by {owner.name!r} of "
                f"{owner.order.__module__}; give it another name or other aliases"
            )
    _FACTS[facts.name] = facts
    _NAME_OF.update(dict.fromkeys(keys, facts.name))


def _origin(order: Order) -> tuple[str, str]:
    """The same for a function and for its reloaded self."""
    return order.__module__, order.__qualname__


def _key(name: str) -> str:
    """Spelling apart: 1F1B, Interleaved1F1B and interleaved_1f1b are found too."""
    return name.lower().replace("-", "").replace("_", "")


@cache
def _load_entry_points() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            # One broken package must not take away everybody's schedules.
            warnings.warn(f"the schedules of {point.value} cannot be used: {error!r}", stacklevel=3)


def _check_shape(known: Facts, ranks: int, stages_per_rank: int, micro_batches: int) -> None:
    given = {"ranks": ranks, "micro_batches": micro_batches}
    chosen = stages_per_rank == CHOSEN == known.stages_per_rank.default
    if not chosen:
        given["stages_per_rank"] = stages_per_rank
    for what, number in given.items():
        if not isinstance(number, int) or number < 1:
            raise ImpossibleShape(f"{known.name}: {what} is {number!r}; set it to a whole number, 1 or more")
    if not chosen and not known.stages_per_rank.allow(stages_per_rank):
        other = known.with_more_stages
        hint = f", or schedule to {other!r}, which takes more" if other else ""
        raise ImpossibleShape(
            f"{known.name} holds {known.stages_per_rank} stages a rank, not {stages_per_rank}; "
            f"set stages_per_rank to {known.stages_per_rank.default}{hint}"
        )
    if not known.ranks.allow(ranks, stages_per_rank, micro_batches):
        nearest = _nearest(ranks, lambda number: known.ranks.allow(number, stages_per_rank, micro_batches))
        hint = f"set ranks to {nearest}" if nearest else f"no number works with {micro_batches} micro-batches"
        raise ImpossibleShape(f"{known.name} needs {known.ranks.text}, not {ranks}; {hint}")
    if not known.micro_batches.allow(ranks, stages_per_rank, micro_batches):
        nearest = _nearest(micro_batches, lambda number: known.micro_batches.allow(ranks, stages_per_rank, number))
        hint = f"set micro_batches to {nearest}" if nearest else f"no number works with {ranks} ranks"
        raise ImpossibleShape(
            f"{known.name} needs {known.micro_batches.text}, not {micro_batches} with {ranks} ranks and "
            f"{stages_per_rank} stages a rank; {hint}"
        )


def _nearest(number: int, works: Callable[[int], bool]) -> str:
    """The nearest numbers below and above that work, in words."""
    below = next(filter(works, range(number - 1, 0, -1)), None)
    above = next(filter(works, range(number + 1, 8 * number + 64)), None)
    return " or ".join(str(one) for one in (below, above) if one is not None)


def _check_options(known: Facts, options: Mapping[str, object]) -> None:
    unknown = [option for option in options if option not in known.options]
    if unknown:
        allowed = ", ".join(known.options) or "none"
        raise UnknownOption(f"{known.name} has no option {unknown[0]!r}; its options are: {allowed}")
