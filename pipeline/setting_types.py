"""Types of settings that are more than a number or a word, and the sentence that refuses a wrong one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

__all__ = [
    "BytesSetting",
    "LossScaleSetting",
    "PartitionSetting",
    "PrecisionSetting",
    "RecomputeSetting",
    "SaveEverySetting",
    "ScheduleOption",
    "did_you_mean",
    "explain",
]

PARTITION_METHODS = ("profile", "parameters", "uniform")
PRECISIONS = ("fp32", "bf16", "fp16")


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence for each wrong setting: what was given and what is allowed, joined by a semicolon."""
    return "; ".join(_sentence(detail, model) for detail in error.errors(include_url=False))


def _sentence(detail: Any, model: type[BaseModel]) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"there is no setting {name!r}; {did_you_mean(name, model.model_fields)}"
    if not name:  # of several settings together
        return str(detail["msg"]).removeprefix("Value error, ")
    allowed = detail["msg"].replace("Input should", "it must", 1)
    field = model.model_fields.get(name)
    default = f" (default: {field.default!r})" if field else ""
    return f"{name} = {detail['input']!r} is not possible: {allowed}{default}"


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """The nearest of ``names`` as a question, or all of them where none is near."""
    known = list(names)
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"


def _partition(value: object) -> object:
    """A method's name, or cut points as a tuple that never goes down."""
    if value in PARTITION_METHODS:
        return value
    if isinstance(value, str) and value.startswith("type:"):
        return _type_pattern(value)
    cuts = _integers(value)
    if cuts is not None and list(cuts) == sorted(cuts):
        return cuts
    hint = f"; {did_you_mean(value, PARTITION_METHODS)}" if cuts is None and isinstance(value, str) else ""
    raise _refusal(
        "it must be one of profile, parameters, uniform, or type:REGEX, or numbers of layers in rising order "
        "as in 0,3,7" + hint
    )


def _type_pattern(method: str) -> str:
    pattern = method.removeprefix("type:")
    if not pattern:
        raise _refusal("after type: must stand the type of a layer, as in type:Block")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refusal(f"after type: must stand a regular expression ({error})") from None
    return method


def _recompute(value: object) -> object:
    """``none``, ``auto``, ``every``, ``every:N`` with N above 1, or layer numbers in order, each once."""
    if isinstance(value, str):
        word, _, step = value.partition(":")
        if value in ("none", "every", "auto"):
            return value
        if word == "every" and step.isdecimal() and int(step) > 0:
            return "every" if int(step) == 1 else f"every:{int(step)}"
    layers = _integers(value)
    if layers is not None:
        return tuple(sorted(set(layers)))
    raise _refusal("it must be none, auto, every, every:N with N at least 1, or layer numbers as in 0,2,5")


def _precision(value: object) -> object:
    """Pairs of a pattern and a type, from one type for all, ``pattern=type,pattern=type``, a mapping, or pairs."""
    if isinstance(value, str):
        value = [word.rpartition("=")[::2] for word in value.split(",")] if "=" in value else _for_all(value)
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, Sequence) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        found = tuple((str(pattern).strip(), str(kind).strip()) for pattern, kind in pairs)
        if all(pattern and kind in PRECISIONS for pattern, kind in found):
            return found
    raise _refusal(
        "it must be as_built, fp32, bf16 or fp16, or such a type for each pattern of layers, as in "
        '{"*": "bf16", "*norm*": "fp32"}, on the command line *=bf16,*norm*=fp32'
    )


def _for_all(kind: str) -> list[tuple[str, str]]:
    return [] if kind == "as_built" else [("*", kind)]


def _bytes(value: object) -> object:
    """A number of bytes, from one or from text such as 8GiB."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?)?B?\s*", str(value))
    if match is not None and match[1].count(".") <= 1 and match[1] != ".":
        unit = match[2] or ""
        return float(match[1]) * (1024 if unit.endswith("i") else 1000) ** (" KMGT".index(unit[0]) if unit else 0)
    raise _refusal("it must be a number of bytes, or one with a unit as in 8GiB or 500MB")


_UNITS = {"": "steps", "step": "steps", "s": "seconds", "second": "seconds", "min": "minutes", "minute": "minutes",
          "h": "hours", "hour": "hours"}  # fmt: skip


def _save_every(value: object) -> object:
    """``never``, ``auto``, or ``"100 steps"``, ``"10 minutes"``, of which steps are whole."""
    if value in ("never", "auto"):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*?)s?\s*", str(value))
    unit = None if match is None else _UNITS.get(match[2])
    if match is not None and unit is not None and float(match[1]) > 0 and (unit != "steps" or match[1].isdecimal()):
        return f"{match[1]} {unit}"
    raise _refusal('it must be never, auto, or so many steps or so much time as in "100 steps" or "10 minutes"')


def _micro_batch(value: object) -> object:
    """``auto``, or a number of rows."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and value.isdecimal() and int(value) > 0:
        return int(value)
    raise _refusal("it must be a number of rows, at least 1, or auto")


def _loss_scale(value: object) -> object:
    if value == "dynamic":
        return value
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if 0 < number < float("inf"):
        return number
    raise _refusal("it must be dynamic, or a number above 0")


def _schedule_option(value: object) -> object:
    if isinstance(value, bool | int | float | str):
        return value
    raise _refusal("it must be a number, a word, true or false")


def _integers(value: object) -> tuple[int, ...] | None:
    """``(0, 3, 7)`` for ``"0,3,7"``, ``"[0, 3, 7]"`` or any sequence of these; None for everything else."""
    if isinstance(value, str):
        value = value.strip().removeprefix("[").removesuffix("]").split(",")
    if not isinstance(value, Sequence) or not value:
        return None
    words = [str(item).strip() for item in value]
    return tuple(map(int, words)) if all(word.isdecimal() for word in words) else None


def _refusal(sentence: str) -> PydanticCustomError:
    # The message is a template for pydantic, and a pattern may hold braces.
    return PydanticCustomError("setting", "{sentence}", {"sentence": sentence})


# NoDecode: on the command line the whole word comes here, not a list split at the commas of a pattern.
PartitionSetting = Annotated[str | tuple[int, ...], NoDecode, BeforeValidator(_partition)]
RecomputeSetting = Annotated[str | tuple[int, ...], NoDecode, BeforeValidator(_recompute)]
PrecisionSetting = Annotated[tuple[tuple[str, str], ...], NoDecode, BeforeValidator(_precision)]
BytesSetting = Annotated[Annotated[float, Field(gt=0)], BeforeValidator(_bytes)]
SaveEverySetting = Annotated[str, BeforeValidator(_save_every)]
LossScaleSetting = Annotated[str | float, BeforeValidator(_loss_scale)]
MicroBatchSetting = Annotated[int | str, BeforeValidator(_micro_batch)]
ScheduleOption = Annotated[bool | int | float | str, BeforeValidator(_schedule_option)]
