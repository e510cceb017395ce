"""One layer at run time: the unit of autograd, of random state, of recomputation and of flat buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.buffers import Buffers, Snapshot
from pipeline.device import generator_of
from pipeline.errors import LayerError
from pipeline.gradients.binding import Binding
from pipeline.gradients.flat import FlatLayer
from pipeline.gradients.queue import WeightGradQueue, drain_together
from pipeline.losses import collect_losses
from pipeline.random_state import absorbed, preserved
from pipeline.shapes import Value, flatten, hides_gradient, settled, unflatten

__all__ = ["Layer", "LayerCall", "Place", "RandomSource"]

Gradients = Sequence[Tensor | None]


class Place(NamedTuple):
    """Where in training a forward happens; with the layer's index it fixes the random numbers drawn."""

    step: int
    micro_batch: int
    random_state: int  # that has absorbed the seed, the step and the micro-batch

    @staticmethod
    def at(seed: int, step: int, micro_batch: int) -> Place:
        return Place(step, micro_batch, absorbed(0, seed, step, micro_batch))


class RandomSource(NamedTuple):
    """The seed of a run, and the lock that ranks hold while they draw when they share one generator."""

    seed: int
    device: torch.device
    lock: threading.Lock | None


class LayerCall:
    """The passage of one micro-batch through one layer: everything its backward needs."""

    __slots__ = ("buffers", "inputs", "kept", "losses", "outputs", "place", "queue")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.queue = WeightGradQueue()
        self.outputs: list[Tensor] = []  # those that need a gradient, in order
        self.losses: list[tuple[str, Tensor]] = []
        self.inputs: list[Tensor] = []  # those that need a gradient, which autograd leaves in them
        self.kept: Value | None = None  # the input, when the layer is to be recomputed
        self.buffers: Snapshot | None = None  # what they were then, where the forward changes them


_NO_BINDING = nullcontext()
_LEAF_CHANGED = "leaf Variable that requires grad is being used in an in-place operation"

# What torch.autograd.backward comes to, without its checks of arguments: these have the shapes of their outputs.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


def _enter(value: Value, call: LayerCall) -> list[Any]:
    """The leaves of ``value`` as the beginning of a graph of the layer's own, which are ``call.inputs``."""
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in value.leaves]
    call.inputs = [leaf.requires_grad_() for leaf, needs in zip(leaves, value.needs_gradient, strict=True) if needs]
    return leaves


class Layer:
    """A layer on the rank that owns it.

    ``module`` is None for a plain callable.  ``recompute`` keeps only the input from the forward to the backward, and
    ``cast`` brings each tensor of the input into the type that the layer computes in.
    A layer that changes its input in place works on a copy: the input may be the user's, be what the layer before has
    saved for its backward, or be needed again for recomputation.
    """

    def __init__(
        self,
        index: int,
        name: str,
        function: Callable[[Any], Any],
        random: RandomSource,
        *,
        module: nn.Module | None = None,
        flat: FlatLayer | None = None,
        binding: Binding | None = None,
        recompute: bool = False,
        cast: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.function = function
        self.module = module
        self.flat = flat
        self.binding = binding
        self.recompute = recompute
        self.cast = cast
        self._generator = generator_of(random.device)
        self._random = random
        self.buffers = Buffers(module)
        self._drew: dict[bool, tuple[int, bool]] = {}  # by training mode: in which step, whether; only under a lock
        self._changes_input: dict[bool, bool] = {}  # by training mode, once it has run in it
        self._changes_buffers = False  # only where the layer is recomputed
        self._left_buffers_in = -1  # the last step in which it was seen not to change them

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, value: Value, place: Place) -> tuple[Value, LayerCall]:
        """One forward of a training step."""
        call = LayerCall(place)
        if self.recompute:
            return self._forward_to_recompute(value, call), call
        return self._forward_with_graph(value, call), call

    def infer(self, value: Value, place: Place) -> tuple[Value, list[tuple[str, Tensor]]]:
        """One forward without gradients; also returns the losses that the layer added."""
        losses: list[tuple[str, Tensor]] = []
        with torch.no_grad():
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in value.leaves]
            out, structure = flatten(self._run(leaves, value, place, losses))
            return Value([self._handed_on(leaf) for leaf in out], structure, (False,) * len(out)), losses

    def _forward_with_graph(self, value: Value, call: LayerCall) -> Value:
        leaves = _enter(value, call)
        with _NO_BINDING if self.binding is None else self.binding.forward(call.queue):
            out, structure = flatten(self._run(leaves, value, call.place, call.losses))
        needs = []
        for place, leaf in enumerate(out):
            need = isinstance(leaf, Tensor) and leaf.requires_grad
            needs.append(need)
            if need:
                call.outputs.append(leaf)
                out[place] = settled(leaf)
            else:
                self._require_visible(leaf)
                out[place] = self._handed_on(leaf)
        return Value(out, structure, tuple(needs))

    def _forward_to_recompute(self, value: Value, call: LayerCall) -> Value:
        """Keep the input and drop the graph, without which nobody could tell which outputs need a gradient."""
        once = LayerCall(call.place)
        call.buffers = self.buffers.snapshot() if self._left_buffers_in != call.place.step else None
        output = self._forward_with_graph(value, once)
        self._note_buffers(call)
        call.kept = value
        call.losses = [(name, loss.detach()) for name, loss in once.losses]
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in output.leaves]
        return Value(leaves, output.structure, output.needs_gradient)

    def _require_visible(self, leaf: Any) -> None:
        if not isinstance(leaf, Tensor) and hides_gradient(leaf):
            raise LayerError(
                f"layer {self.name} returned a {type(leaf).__name__}, in which there are tensors that need a "
                "gradient, but only those in tuples, lists and dicts get one; for a dataclass, call "
                "torch.export.register_dataclass once"
            )

    def _note_buffers(self, call: LayerCall) -> None:
        """Keep what buffers were only for a layer that changes them, which is looked at once a step until it does."""
        if call.buffers is not None and not self._changes_buffers:
            self._changes_buffers = call.buffers.outdated()
            if not self._changes_buffers:
                call.buffers, self._left_buffers_in = None, call.place.step

    def _handed_on(self, leaf: Any) -> Any:
        """An output as the next layer gets it: dense, and in memory that this layer does not use again."""
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.clone() if not leaf.requires_grad and self.buffers.hold(leaf) else settled(leaf)

    def _run(self, leaves: list[Any], value: Value, place: Place, losses: list[tuple[str, Tensor]]) -> Any:
        mode = self.module is not None and self.module.training
        changes = self._changes_input.get(mode)
        if changes is not False:  # known to, or not known
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # Autograd does not let a leaf that needs a gradient be changed, so that there is nothing to see.
        watched = leaves if changes is None or self.recompute or False in value.needs_gradient else ()
        before = _versions(watched)
        outer = collect_losses(losses)
        try:
            if self.cast is not None:
                leaves = [self.cast(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            result = self._run_seeded(unflatten(leaves, value.structure), place)
        except RuntimeError as error:
            if changes is False and _LEAF_CHANGED in str(error):
                raise self._changed_input(mode) from error
            raise
        finally:
            collect_losses(outer)
        if changes is None:
            self._changes_input[mode] = _versions(watched) != before
        elif not changes and _versions(watched) != before:
            raise self._changed_input(mode)
        return result

    def _changed_input(self, mode: bool) -> LayerError:
        self._changes_input[mode] = True
        return LayerError(
            f"layer {self.name} changed its input in place, but did not when it ran first, so that it was given no "
            "copy. It gets one from now on: run the step again"
        )

    def _run_seeded(self, argument: Any, place: Place) -> Any:
        """Run user code with the random state of this place.

        Where ranks are threads of one process they share a generator: a layer that draws runs under the lock, and so
        does every layer once a step, to see whether it draws.
        """
        random, generator = self._random, self._generator
        seed = absorbed(place.random_state, self.index)
        if random.lock is None:
            generator.manual_seed(seed)
            return self.function(argument)
        mode = self.module is not None and self.module.training
        if self._drew.get(mode) == (place.step, False):
            return self.function(argument)
        with random.lock, preserved(random.device):
            generator.manual_seed(seed)
            before = generator.get_state()
            result = self.function(argument)
            drew = self._drew.get(mode, (0, False))[1] or not torch.equal(before, generator.get_state())
            self._drew[mode] = (place.step, drew)
        return result

    # -- backward --------------------------------------------------------------------------------------------

    def backward(self, call: LayerCall, gradients: Gradients, loss_scale: float, *, defer: bool) -> Gradients:
        """The gradients of the inputs that need one, given those of the outputs that do.

        Gradients of weights are added into the flat buffer; with ``defer`` their products wait in the call's
        queue until it is drained.  ``loss_scale`` is the micro-batch's share of the step, the gradient of
        each loss that the layer added.
        """
        if call.kept is not None:
            self._recompute(call, call.kept)
        pairs = [(out, g) for out, g in zip(call.outputs, gradients, strict=True) if g is not None]
        if call.losses and loss_scale:
            pairs += [(loss, torch.full_like(loss, loss_scale)) for _, loss in call.losses if loss.requires_grad]
        call.outputs, call.losses = [], []
        for x in call.inputs:
            x.grad = None  # user code may have run a backward of its own in the forward
        if pairs:
            roots, given = zip(*pairs, strict=True)
            with _NO_BINDING if self.binding is None else self.binding.backward(call.queue, inline=not defer):
                _run_backward(roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True)
        inputs, call.inputs = call.inputs, []
        return [None if x.grad is None else settled(x.grad) for x in inputs]

    def weight_gradients(self, *calls: LayerCall) -> None:
        """The products that deferred backwards left; of several micro-batches in one."""
        if len(calls) == 1:
            calls[0].queue.drain()
        else:
            drain_together([call.queue for call in calls])

    def _recompute(self, call: LayerCall, value: Value) -> None:
        call.kept, call.losses = None, []
        before, call.buffers = call.buffers or self.buffers.snapshot(), None
        with before.in_place():
            self._forward_with_graph(value, call)


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
