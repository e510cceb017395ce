"""The state of a rank by layout-independent names: what is gathered, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.build import BuiltLayers
from pipeline.errors import StateError
from pipeline.links.protocol import LANE_CONTROL, Group
from pipeline.mesh import Mesh
from pipeline.module import Tie
from pipeline.ties import Role, owner_name, role

__all__ = ["NamedState", "gather_to_first", "load_named", "named_state"]


class NamedState(NamedTuple):
    """The tensors of this rank under the names of a whole model: ``owned`` once in the pipeline, ``copies`` of
    tied parameters whose first use is on another rank, and of all that a second copy of a layer holds."""

    owned: dict[str, Tensor]
    copies: dict[str, Tensor]


def named_state(built: BuiltLayers, ties: Sequence[Tie]) -> NamedState:
    """Parameters and persistent buffers of a rank's layers, as they are, not copied.

    A tied parameter has one name, that of its first use in the layer list.
    """
    owned: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for held, layer in built.layers.items():
        if layer.module is None:
            continue
        parameters = dict(layer.module.named_parameters())
        for name, tensor in layer.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            if name not in parameters:
                (copies if held.copy else owned)[f"layers.{held.layer}.{name}"] = tensor.detach()
                continue
            part = role(ties, built.layers, held, name)
            if part is not Role.ALIAS:
                (owned if part is Role.OWNER else copies)[owner_name(ties, held.layer, name)] = tensor.detach()
    return NamedState(owned, copies)


def load_named(state: NamedState, values: Mapping[str, Tensor], world: Group) -> None:
    """Copy values into the tensors of every rank, in place.  Collective.

    Raises ``StateError`` on every rank for a name that is missing or too many, or for another shape, before anything
    is changed.
    """
    targets = [*state.owned.items(), *state.copies.items()]
    told = world.all_gather_object((_misfit(targets, values), [name for name, _ in targets], list(values)))
    problems = [text for text, _, _ in told if text]
    known, given = ({name for names in column for name in names} for column in list(zip(*told, strict=True))[1:])
    if surplus := sorted(given - known):
        problems.append(f"the model has no {surplus[0]!r}, which is to be loaded; names too many: {len(surplus)}")
    if problems:
        raise StateError(problems[0])
    with torch.no_grad():
        for name, tensor in targets:
            tensor.copy_(values[name])


def _misfit(targets: Sequence[tuple[str, Tensor]], values: Mapping[str, Tensor]) -> str:
    """What keeps values from being loaded on this rank, or nothing."""
    for name, tensor in targets:
        if name not in values:
            return f"there is no {name!r} in what is to be loaded; it has {len(values)} names"
        if values[name].shape != tensor.shape:
            return f"{name} has shape {tuple(values[name].shape)}, the model needs {tuple(tensor.shape)}"
    return ""


def gather_to_first(owned: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Copies of the tensors of all ranks of the first pipeline, on rank 0 in host memory; empty elsewhere.

    Collective.  Tensors go one by one from their rank to rank 0, in layer order.
    """
    mine = [(name, tuple(t.shape), t.dtype) for name, t in owned.items()] if mesh.data_rank == 0 else []
    result: dict[str, Tensor] = {}
    for rank, forms in enumerate(mesh.world.all_gather_object(mine)):
        for name, shape, dtype in forms:
            if rank == 0 == mesh.rank:
                result[name] = owned[name].detach().to("cpu", copy=True)
            elif mesh.rank == 0:
                result[name] = torch.empty(shape, dtype=dtype)
                mesh.link.receive(rank, result[name], LANE_CONTROL).wait()
            elif mesh.rank == rank:
                mesh.link.send(0, owned[name].detach().cpu().contiguous(), LANE_CONTROL).wait()
    return dict(sorted(result.items(), key=_layer_order))


def _layer_order(entry: tuple[str, Any]) -> int:
    return int(entry[0].split(".")[1])
