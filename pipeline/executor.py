"""The one interpreter: a rank's Program compiled to bound callables, run in order and stamped with the time."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.errors import FormVaried, LinkError
from pipeline.exchange import Crossing, Inbox, send_gradients, send_value, value_from
from pipeline.links.protocol import LANE_B, LANE_F, Link
from pipeline.recorder import Stamps
from pipeline.shapes import Value, entering, unflatten
from pipeline.stage import Stage, StagePass
from pipeline.step import Failure, Key, Step
from pipeline.watch import Board
from schedules import Action, Instruction, Kind, Op, Pair, Program
from schedules.action import actions_of

__all__ = ["Executor"]


class _Operation(NamedTuple):
    """One instruction, compiled: wait for what it needs, then run it; ``slot`` is its place in the row, or -1.

    One that ``lasts`` is written on the board; starting a transfer is not.  Where the step has failed ``make_up`` runs
    instead, or after it, for what replicas wait for.
    """

    run: Callable[[], None]
    lasts: bool = True
    waits: tuple[Callable[[], None], ...] = ()
    slot: int = -1
    action: Action | None = None
    make_up: Callable[[], None] | None = None


class Executor:
    """Runs one rank's row of a Program.

    ``peers`` maps pipeline ranks, as the Program counts them, to ranks of the link.  With ``batch_weights`` the first
    of several W of a stage that stand side by side in the row does the work of all, and the stamps of the others
    enclose nothing.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        link: Link,
        peers: Sequence[int],
        board: Board,
        device: torch.device,
        *,
        depth: int,
        batch_weights: bool,
    ) -> None:
        self.program = program
        self.schedule = program.schedule
        self.rank = rank
        self._stages = stages
        self._shared = [(stage.number, stage.shards) for stage in stages.values() if stage.shards is not None]
        self._link = link
        self._peers = peers
        self._board = board
        self._device = device
        self._step: Step
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        for peer in range(self.schedule.ranks):
            for lane, name in _LANES:
                crossings = [_crossing(m, lane) for m in program.lane(peer, rank, name)]
                if crossings:
                    inbox = Inbox(link, peers[peer], lane, crossings, depth, device)
                    self._inboxes[peer, lane] = inbox
        self._arrived = dict.fromkeys(self._inboxes, 0)
        self._together = _side_by_side(self.schedule.rows[rank]) if batch_weights else {}
        self.code = tuple(self._compile())
        self.stamps = Stamps(len(self.schedule.rows[rank]))

    # -- compiling -------------------------------------------------------------------------------------------

    def _compile(self) -> list[_Operation]:
        slot = 0
        code = []
        for index, instruction in enumerate(self.program.rows[self.rank]):
            if isinstance(instruction.action, Pair) and instruction.op is Op.PAIR:
                code += self._pair(instruction.action, slot)
                slot += 1
            elif instruction.op in _COMPUTE and isinstance(instruction.action, Action):
                code.append(self._compute(instruction.action, slot))
                slot += 1
            elif instruction.op in _SHARED:
                run = self._share(instruction, index)
                code.append(_Operation(run, instruction.op is not Op.UNSHARD))
            else:
                code.append(_Operation(self._transfer(instruction), instruction.op not in _STARTING))
        return code

    def _compute(self, action: Action, slot: int) -> _Operation:
        number, kind, micro_batch = action
        stage, previous = self._stages[number], self.schedule.previous_stage(number, micro_batch)
        run: Callable[[], None]
        if kind is Kind.F:
            run = partial(self._forward, stage, micro_batch, previous, self.schedule.next_stage(number, micro_batch))
        elif kind is Kind.W:
            run = partial(self._weight_gradients, stage, self._together.get(slot, (micro_batch,)))
        else:
            run = partial(self._gradients, stage, micro_batch, previous, kind is Kind.I)
        parts = stage.parts
        return _Operation(
            run, True, self._waits(action), slot, action, None if parts is None else partial(parts.make_up, kind)
        )

    def _pair(self, pair: Pair, slot: int) -> list[_Operation]:
        """Two actions as one instruction: wait for both, run both, one stamp from the first to the second."""
        first, second = self._compute(pair.first, slot), self._compute(pair.second, slot)
        both = (*first.waits, *second.waits)

        half = False

        def run() -> None:
            nonlocal half
            first.run()
            half = True
            second.run()
            half = False

        def make_up() -> None:
            nonlocal half
            for one in (second,) if half else (first, second):
                if one.make_up is not None:
                    one.make_up()
            half = False

        return [_Operation(run, True, both, slot, pair.first, make_up)]

    def _waits(self, action: Action) -> tuple[Callable[[], None], ...]:
        stage, kind, micro_batch = action
        if kind is Kind.F:
            source = self.schedule.previous_stage(stage, micro_batch)
        elif kind is Kind.W:
            source = None
        else:
            source = self.schedule.next_stage(stage, micro_batch)
        if source is None or self.schedule.rank_of_stage[source] == self.rank:
            return ()
        peer = self.schedule.rank_of_stage[source]
        if kind is Kind.F:
            return (partial(self._await_value, self._inboxes[peer, LANE_F], peer, Crossing(stage, micro_batch)),)
        at, key = Crossing(source, micro_batch), (stage, micro_batch)
        return (partial(self._await_gradients, self._inboxes[peer, LANE_B], peer, at, key),)

    def _share(self, instruction: Instruction, index: int) -> Callable[[], None]:
        """What replicas of a stage do together; nothing where there is one."""
        shards = self._stages[instruction.stage].shards
        if shards is None:
            return _do_nothing
        if instruction.op is Op.RESHARD:
            return shards.reshard
        if instruction.op is Op.REDUCE_GRAD:
            return shards.reduce
        row = self.program.rows[self.rank]
        passes = (i.action for i in islice(row, index, None) if i.op in _COMPUTE or i.op is Op.PAIR)
        own = ([a.kind for a in actions_of(entry) if a.stage == instruction.stage] for entry in passes if entry)
        return partial(shards.unshard, frozenset(next(kinds for kinds in own if kinds)))

    def _transfer(self, instruction: Instruction) -> Callable[[], None]:
        op, action, peer, _ = instruction
        if op is Op.STEP:
            return self._finish
        if not isinstance(action, Action):
            raise LinkError(f"the program holds {instruction}, which this executor does not know")
        if op in (Op.RECV_F, Op.RECV_B):
            lane = LANE_F if op is Op.RECV_F else LANE_B
            index = self._arrived[peer, lane]
            self._arrived[peer, lane] += 1
            return partial(self._inboxes[peer, lane].post, index)
        key = (action.stage, action.micro_batch)
        if op is Op.SEND_F:
            following = self.schedule.next_stage(*key)
            return partial(self._send_value, self._peers[peer], key, Crossing(_present(following), key[1]))
        if op is Op.SEND_B:
            return partial(self._send_gradients, self._peers[peer], key, Crossing(*key))
        if op is Op.WAIT_SEND:
            return partial(self._wait_send, (action.kind is Kind.F, *key))
        raise LinkError(f"the program holds {instruction}, which this executor does not know")

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, step: Step) -> None:
        """Run the whole row.

        A layer that raises poisons the step on this rank: nothing more is computed, every agreed message is still
        posted and sent, and ``step.failure`` tells.  Raises ``LinkError`` when a peer is gone or a wait times out.
        """
        self._step = step
        board, starts, ends, clock = self._board, self.stamps.starts, self.stamps.ends, time.perf_counter
        self.stamps.begin = clock()
        self.stamps.beside = []
        for _, shards in self._shared:
            shards.exchanged = []
        try:
            for inbox in self._inboxes.values():
                inbox.open(step.forms)
            for index, (run, lasts, waits, slot, action, make_up) in enumerate(self.code):
                if lasts:
                    board.at(index)
                for wait in waits:
                    wait()
                if slot >= 0:
                    starts[slot] = clock()
                if action is None or step.failure is None:
                    try:
                        run()
                    except LinkError:
                        raise
                    except Exception as error:
                        self._fail(error, str(action or self.program.rows[self.rank][index]))
                        if action is None:
                            run()  # a SEND whose value did not fit: send what is owed to the peer
                        elif make_up is not None:
                            make_up()
                elif make_up is not None:
                    make_up()
                if slot >= 0:
                    ends[slot] = clock()
        finally:
            self.stamps.end = clock()
            del self._step

    def _fail(self, error: Exception | None, action: str) -> None:
        """Compute nothing more in this step; ``error`` is None where a peer had failed before."""
        step = self._step
        if step.failure is not None:
            return
        layer = next((p.current.name for p in step.passes.values() if p.current is not None), "")
        step.failure = Failure(action, layer, error, time.time())
        step.passes.clear()
        step.values.clear()
        step.gradients.clear()
        self._board.fail(step.number)
        if error is not None and not isinstance(error, FormVaried):
            where = f" in layer {layer}" if layer else ""
            error.add_note(f"raised on rank {self._link.rank} in {action}{where}")
            traceback.print_exception(error)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _await_value(self, inbox: Inbox, peer: int, at: Crossing) -> None:
        form, tensors = inbox.take(at)
        if not self._poisoned(form is None, peer, at) and form is not None:
            self._step.values[at] = value_from(form, tensors)

    def _await_gradients(self, inbox: Inbox, peer: int, at: Crossing, key: Key) -> None:
        form, tensors = inbox.take(at)
        if self._poisoned(form is None, peer, key) or form is None:
            return
        needs = self._step.passes[key].needs_gradient
        if needs == form.needs_gradient:
            self._step.gradients[key] = tensors
            return
        remaining = iter(tensors)
        by_leaf = [next(remaining) if needed else None for needed in form.needs_gradient]
        self._step.gradients[key] = [g for g, n in zip(by_leaf, needs, strict=True) if n]

    def _poisoned(self, told: bool, peer: int, key: Key) -> bool:
        if told or self._board.failed(self._peers[peer], self._step.number):
            self._fail(None, f"{key[0]}F{key[1]}")
        return self._step.failure is not None

    # -- computing -------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, micro_batch: int, previous: int | None, following: int | None) -> None:
        step = self._step
        key = (stage.number, micro_batch)
        value = entering(step.items[micro_batch].inputs) if previous is None else step.values.pop(key)
        passage = step.passes[key] = StagePass()
        targets = step.items[micro_batch].targets if following is None and step.with_loss else None
        if step.train:
            output, result = stage.forward(value, step.places[micro_batch], passage, targets)
        else:
            output, result = stage.infer(value, step.places[micro_batch], passage, targets, step.with_loss)
            del step.passes[key]
        passage.needs_gradient = output.needs_gradient
        for name, loss in passage.losses:
            step.rooted = True
            by_micro_batch = step.added.setdefault(name, {})
            before = by_micro_batch.get(micro_batch)
            by_micro_batch[micro_batch] = loss if before is None else before + loss
        if following is None:
            self._finish_route(output, result, micro_batch)
        elif self.schedule.rank_of_stage[following] == self.rank:
            step.values[following, micro_batch] = output
        else:
            step.leaving_values[key] = output

    def _finish_route(self, output: Value, result: Value, micro_batch: int) -> None:
        if self._step.with_loss:
            loss = result.leaves[0].detach()
            self._step.losses[micro_batch] = loss.reshape(()) if loss.dim() else loss
            self._step.rooted |= result.needs_gradient[0]
        else:
            leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in output.leaves]
            self._step.outputs[micro_batch] = unflatten(leaves, output.structure)

    def _weight_gradients(self, stage: Stage, micro_batches: Sequence[int]) -> None:
        stage.weight_gradients(*[self._step.passes[stage.number, i] for i in micro_batches])
        for micro_batch in micro_batches:
            del self._step.passes[stage.number, micro_batch]

    def _gradients(self, stage: Stage, micro_batch: int, previous: int | None, defer: bool) -> None:
        """An I, which leaves the weights' gradients to its W, or a B, which does not."""
        step = self._step
        key = (stage.number, micro_batch)
        gradients = step.gradients.pop(key, ())
        result = stage.backward(step.passes[key], gradients, step.seeds[micro_batch], defer=defer)
        if not defer:
            del step.passes[key]
        if previous is None:
            return
        if self.schedule.rank_of_stage[previous] == self.rank:
            step.gradients[previous, micro_batch] = result
        else:
            step.leaving_gradients[key] = result

    # -- sending ---------------------------------------------------------------------------------------------

    def _send_value(self, peer: int, key: tuple[int, int], at: Crossing) -> None:
        step = self._step
        value = step.leaving_values.pop(key, None) if step.failure is None else None
        step.sending[(True, *key)] = send_value(self._link, peer, at, value, step.forms, self._device)

    def _send_gradients(self, peer: int, key: tuple[int, int], at: Crossing) -> None:
        step = self._step
        gradients = step.leaving_gradients.pop(key, None) if step.failure is None else None
        step.sending[(False, *key)] = send_gradients(self._link, peer, at, gradients, step.forms, self._device)

    def _wait_send(self, key: tuple[bool, int, int]) -> None:
        for pending in self._step.sending.pop(key, ()):
            pending.wait()

    def _finish(self) -> None:
        for key in tuple(self._step.sending):
            self._wait_send(key)
        for number, shards in self._shared:
            shards.settle()
            self.stamps.beside += [one._replace(what=f"{one.what} {number}") for one in shards.exchanged]


_LANES: tuple[tuple[int, Literal["F", "B"]], ...] = ((LANE_F, "F"), (LANE_B, "B"))
_COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
_SHARED = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
_STARTING = frozenset({Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B})


def _crossing(message: tuple[Action, Action], lane: int) -> Crossing:
    """A message's name: the consuming stage of the value, also for the gradient that comes back for it."""
    producing, consuming = message
    return Crossing((consuming if lane == LANE_F else producing).stage, consuming.micro_batch)


def _side_by_side(row: Sequence[Action | Pair]) -> dict[int, tuple[int, ...]]:
    """For every W, by its place in the row, the micro-batches whose W it does: with the first of several W of a stage
    that stand side by side it is all of theirs, with the others none."""
    found: dict[int, tuple[int, ...]] = {}
    first: tuple[int, int] | None = None  # stage and place of the first of those side by side
    for slot, entry in enumerate(row):
        if isinstance(entry, Pair) or entry.kind is not Kind.W:
            first = None
        elif first is not None and first[0] == entry.stage:
            found[first[1]] += (entry.micro_batch,)
            found[slot] = ()
        else:
            first = entry.stage, slot
            found[slot] = (entry.micro_batch,)
    return found


def _do_nothing() -> None:
    pass


def _present(stage: int | None) -> int:
    if stage is None:
        raise LinkError("the program sends the output of a route's last stage")
    return stage
