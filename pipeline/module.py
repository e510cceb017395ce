"""A model as a list of layers that are built later, each on the rank that owns it."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from pipeline.errors import ModelError

__all__ = ["Entry", "LayerSpec", "PipelineModule", "TiedLayerSpec", "rows"]

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, init=False)
class LayerSpec:
    """A layer to be built as ``factory(*args, **kwargs)`` on the rank that owns it, and nowhere else.

    ``factory`` is usually an ``nn.Module`` class.  A class attribute ``data_dependent_shapes = True`` declares
    that the shapes of its outputs depend on the *values* of its inputs and not only on their shapes.  Without it the
    engine finds that out, at the price of running once again the first step in which they are different.
    """

    factory: Callable[..., nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        _require_callable(factory)
        object.__setattr__(self, "factory", factory)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)


@dataclass(frozen=True, slots=True, init=False)
class TiedLayerSpec:
    """A layer that shares all its parameters with every other layer of the same ``key``.

    All uses of a key are built by the same factory and arguments.  ``forward(module, x)`` replaces the module's
    own ``forward`` for this use: an embedding read backwards as the output head, for example.
    """

    key: str
    factory: Callable[..., nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward: Callable[[Any, Any], Any] | None

    def __init__(
        self,
        key: str,
        factory: Callable[..., nn.Module],
        *args: Any,
        forward: Callable[[Any, Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _require_callable(factory)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "factory", factory)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        object.__setattr__(self, "forward", forward)


def _require_callable(factory: object) -> None:
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ModelError(
            f"a layer spec takes a class or a function that builds a module, not {type(factory).__name__}; "
            "put a module that is already built into the list as it is"
        )


Entry = LayerSpec | TiedLayerSpec | nn.Module | Callable[[Any], Any]


def rows(targets: Any) -> float:
    """The default weight of a micro-batch: the leading size of the first tensor, 1 for a scalar."""
    for leaf in tree_iter(targets):
        if isinstance(leaf, Tensor):
            return float(leaf.shape[0]) if leaf.dim() else 1.0
    return 1.0


class Use(NamedTuple):
    """One place where a tied parameter is used: a layer, and the parameter's name there (None: all of them).

    ``copy`` tells the copies of a layer apart where a schedule keeps two.
    """

    layer: int
    parameter: str | None
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that are one and the same in several layers; uses stand in layer order."""

    name: str
    uses: tuple[Use, ...]


class PipelineModule:
    """A model as a list of layers, with its loss.

    Parameters
    ----------
    layers:
        ``LayerSpec``, ``TiedLayerSpec``, ready ``nn.Module`` objects or plain callables of one argument; or one
        ``nn.Sequential``, whose children are taken.  Each layer gets the output of the one before it as its only
        argument: a tensor, or any nesting of tuples, lists and dicts of tensors, numbers and ``None``.
    loss_fn:
        ``loss_fn(output, targets)`` returns the mean loss of a micro-batch, a scalar tensor.
    loss_weight:
        ``loss_weight(targets)`` is the weight of a micro-batch in the step, by default its number of rows.  The
        step's loss is the weighted mean, however unevenly the samples are dealt to micro-batches.

    Building one has no side effects: specs are built later, each under a random seed of its own layer index.
    """

    def __init__(
        self,
        layers: Iterable[Entry] | nn.Sequential,
        loss_fn: LossFn,
        loss_weight: Callable[[Any], float] = rows,
        *,
        loss_scope: str = "micro_batch",
    ) -> None:
        if loss_scope != "micro_batch":
            raise ModelError(
                f"loss_scope={loss_scope!r} is not available: a loss that couples samples of different micro-batches "
                'cannot be split; use loss_scope="micro_batch"'
            )
        entries = tuple(layers)
        if not entries:
            raise ModelError("the list of layers is empty; give at least one layer")
        for index, entry in enumerate(entries):
            if not isinstance(entry, LayerSpec | TiedLayerSpec) and not callable(entry):
                raise ModelError(
                    f"layer {index} is a {type(entry).__name__}; a layer is a LayerSpec, a TiedLayerSpec, "
                    "a module or a callable"
                )
            if inspect.isclass(entry):
                raise ModelError(f"layer {index} is the class {entry.__name__}; wrap it: LayerSpec({entry.__name__})")
        if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise ModelError(
                f"the loss {type(loss_fn).__name__} has trainable parameters, which belong to no layer; "
                "put them into a layer at the end of the list"
            )
        self.entries: tuple[Entry, ...] = entries
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self._ties = _find_ties(entries)  # now: when layers are built, each is given parameters of its own

    def __len__(self) -> int:
        return len(self.entries)

    def type_of(self, index: int) -> str:
        """The name of the class or function of a layer, as ``partition="type:REGEX"`` sees it."""
        entry = self.entries[index]
        made_of = entry.factory if isinstance(entry, LayerSpec | TiedLayerSpec) else entry
        if isinstance(made_of, nn.Module):
            return type(made_of).__name__
        return getattr(made_of, "__name__", type(made_of).__name__)

    def shapes_depend_on_data(self, index: int) -> bool:
        """Whether the layer declares output shapes that depend on the values of its inputs."""
        entry = self.entries[index]
        made_of = entry.factory if isinstance(entry, LayerSpec | TiedLayerSpec) else entry
        return bool(getattr(made_of, "data_dependent_shapes", False))

    def ties(self) -> tuple[Tie, ...]:
        """What is shared between layers: by key of ``TiedLayerSpec``, or because modules hold the same parameter."""
        return self._ties

    def facts(self) -> dict[str, str]:
        """What is equal on all ranks that were given the same code, by name: each layer, the loss, and a hash of each
        source file that defines one of them."""
        facts = {f"layer {index}": self._describe(index) for index in range(len(self))}
        facts["loss"] = _name_of(self.loss_fn)
        facts["loss weight"] = _name_of(self.loss_weight)
        for thing in (*self.entries, self.loss_fn, self.loss_weight, type(self)):
            name, file = _source(thing)
            if file and f"code of {name}" not in facts:
                facts[f"code of {name}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        return facts

    def _describe(self, index: int) -> str:
        entry = self.entries[index]
        tied = f" tied as {entry.key!r}" if isinstance(entry, TiedLayerSpec) else ""
        return f"{self.type_of(index)}{_arguments(entry)}{tied}"


def _find_ties(entries: Sequence[Entry]) -> tuple[Tie, ...]:
    uses: dict[str, list[Use]] = {}
    name_of: dict[int, str] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, TiedLayerSpec):
            uses.setdefault(entry.key, []).append(Use(index, None))
        elif isinstance(entry, nn.Module):
            for name, parameter in entry.named_parameters():
                first = name_of.setdefault(id(parameter), f"layers.{index}.{name}")
                uses.setdefault(first, []).append(Use(index, name))
    return tuple(Tie(name, tuple(places)) for name, places in uses.items() if len(places) > 1)


def _arguments(entry: Entry) -> str:
    if not isinstance(entry, LayerSpec | TiedLayerSpec):
        return ""
    shown = [_shown(a) for a in entry.args] + [f"{k}={_shown(v)}" for k, v in sorted(entry.kwargs.items())]
    return f"({', '.join(shown)})"


def _shown(value: object) -> str:
    """The value where its text is the same in every process, else its type."""
    plain = isinstance(value, bool | int | float | str | tuple | list | dict | torch.dtype | type(None))
    return repr(value) if plain and " at 0x" not in repr(value) else type(value).__name__


def _source(thing: object) -> tuple[str, str]:
    """The module that defines a class, function or object, and its file; that is empty where there is none, as at a
    prompt."""
    if isinstance(thing, LayerSpec | TiedLayerSpec):
        thing = thing.factory
    name = getattr(thing, "__module__", None) or type(thing).__module__
    return name, getattr(sys.modules.get(name), "__file__", None) or ""


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
