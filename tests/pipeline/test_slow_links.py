"""Exchanges by nodes, and compressed ones: the same sums, less of them over slow links, and nothing lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import LayerCost, Profile
from pipeline import LayerSpec, PipelineConfig, PipelineModule, initialize, run_local
from pipeline.batch import Item
from pipeline.comm.behind import AT_ONCE, behind
from pipeline.comm.compress import Bf16, Compressor, Method, PowerSGD, TopK
from pipeline.comm.ways import Ways, ways_of
from pipeline.errors import ConfigError, StepFailed
from pipeline.links.protocol import Exchange
from pipeline.mesh import Mesh, Traffic, make_mesh
from tests.pipeline.layouts import Layout
from tests.pipeline.models import Recipe, adamw, restless
from tests.pipeline.processes import try_processes
from tests.pipeline.reference import agree, plainly
from tests.pipeline.running import everywhere, run, same_bits, train_here, transformer_case

BY_NODES = {"comm_gradients": "hierarchical", "comm_parameters": "hierarchical", "comm_states": "hierarchical"}
RECIPE = Recipe(dtype=torch.float64)

# -- collectives by nodes ------------------------------------------------------------------------------------


def ways_here(data: int, per_node: int, **others: Any) -> tuple[Mesh, Ways]:
    config = PipelineConfig(data_parallel=data, ranks_per_node=per_node, **{**BY_NODES, **others})
    mesh = make_mesh(data, ranks_per_node=per_node, device="cpu")
    return mesh, ways_of(config, mesh)


def every_collective(data: int, per_node: int) -> list[bool]:
    """Whether each gives what the flat one gives, of whole numbers, which add up exactly in any order."""
    mesh, ways = ways_here(data, per_node)
    flat, layered = mesh.replicas, ways.gradients
    assert layered is not flat
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for length in (1, 5, 12):
            whole = ((torch.arange(length * data) + 7 * flat.rank) % 20).to(dtype)
            for tensor in (whole, whole[: length + 1].clone()):
                ours, theirs = tensor.clone(), tensor.clone()
                layered.all_reduce(ours)
                flat.all_reduce(theirs)
                found.append(torch.equal(ours, theirs))
            ours, theirs = whole.new_empty(length), whole.new_empty(length)
            layered.reduce_scatter(ours, whole.clone(), async_op=True).wait()
            flat.reduce_scatter(theirs, whole.clone())
            found.append(torch.equal(ours, theirs))
            ours, theirs = torch.empty_like(whole), torch.empty_like(whole)
            layered.all_gather_into(ours, whole[:length].clone(), async_op=True).wait()
            flat.all_gather_into(theirs, whole[:length].clone())
            found.append(torch.equal(ours, theirs))
            for source in range(data):
                ours, theirs = whole.clone(), whole.clone()
                layered.broadcast(ours, source)
                flat.broadcast(theirs, source)
                found.append(torch.equal(ours, theirs))
    return found


@pytest.mark.parametrize(
    ("data", "per_node", "processes"),
    [(4, 2, False), (6, 2, False), (6, 3, False), (4, 2, True)],
    ids=["2 nodes of 2", "3 nodes of 2", "2 nodes of 3", "processes"],
)
def test_collectives_by_nodes_give_what_flat_ones_give(data: int, per_node: int, processes: bool) -> None:
    assert all(all(found) for found in everywhere(every_collective, data, data, per_node, processes=processes))


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("layout", "how"),
    [
        (Layout("gpipe", 4, data_parallel=4), {"ranks_per_node": 2}),
        (Layout("1f1b", 6, data_parallel=6), {"ranks_per_node": 3}),
        (Layout("interleaved-1f1b", 8, 2, data_parallel=4), {"ranks_per_node": 4}),
        (Layout("zb-v", 8, 2, data_parallel=4), {"ranks_per_node": 2, "mesh_inside": "data"}),
        (Layout("dualpipe", 8, 2, data_parallel=4), {"ranks_per_node": 4, "mesh_inside": "pipe"}),
    ],
    ids=str,
)
def test_training_by_nodes_equals_plain_pytorch(layout: Layout, how: dict[str, Any], zero: int) -> None:
    case = transformer_case(RECIPE, 4, optimizer=adamw)
    found = run(case, layout, zero=zero, gradient_clipping=0.5, **BY_NODES, **how)
    agree(found, plainly(case, layout, found.before, clip=0.5), str(layout), 1e-11)


@pytest.mark.parametrize("zero", [0, 3])
def test_processes_exchange_by_nodes(zero: int) -> None:
    case, layout = transformer_case(RECIPE, 4, optimizer=adamw), Layout("1f1b", 4, data_parallel=4)
    results = everywhere(train_here, 4, case, layout, processes=True, zero=zero, ranks_per_node=2, **BY_NODES)
    assert all(agrees for _, agrees in results)
    found = results[0][0]
    agree(found, plainly(case, layout, found.before), str(layout), 1e-11)


def test_what_lies_inside_does_not_change_the_bits() -> None:
    case, layout = transformer_case(Recipe(), 4, optimizer=restless), Layout("zb-h1", 6, data_parallel=3)
    first, second = (run(case, layout, mesh_inside=inside) for inside in ("pipe", "data"))
    assert same_bits(first, second)


class Fails(nn.Module):
    """A layer that raises on one data-parallel rank in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and x[0, 0] < 0:
            raise RuntimeError("a fault of the data")
        return x * self.weight


def fails_once(settings: dict[str, Any]) -> list[float]:
    module = PipelineModule([LayerSpec(Fails), LayerSpec(nn.Linear, 3, 1)], nn.functional.mse_loss)
    config = {"data_parallel": 4, "ranks_per_node": 2, "micro_batches": 1, "partition": "uniform", **settings}
    engine = initialize(module, config=config, optimizer=partial(torch.optim.SGD, lr=0.1))
    sign = -1.0 if engine.mesh.data_rank == 2 else 1.0
    losses = []
    for step in range(5):
        item = Item(torch.full((2, 3), sign * (1 + step)), torch.zeros(2, 1))
        try:
            losses.append(float(engine.train_batch(iter([item]))))
        except StepFailed as error:
            shards = [shard for shards in engine._planned().built.shards.values() for shard in shards]
            rests = [s.compressor.rest for s in shards if s.compressor is not None and s.compressor.rest is not None]
            if error.rank != 2 or any(rest.any() for rest in rests):
                raise AssertionError(f"rank {error.rank} failed, and {rests} is still to be added") from None
    return losses


@pytest.mark.parametrize(
    "settings", [BY_NODES, {**BY_NODES, "zero": 3}, {"comm_compress": "topk"}, {"comm_compress": "powersgd"}], ids=str
)
def test_a_layer_that_raises_fails_the_step_on_all_ranks_and_the_next_is_clean(settings: dict[str, Any]) -> None:
    results = run_local(fails_once, 4, settings, timeout=20.0)
    assert [len(losses) for losses in results] == [4] * 4
    assert results == [results[0]] * 4


class Dies(nn.Module):
    """A layer whose process is killed in the second step, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and os.environ.get("RANK") == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        result: Tensor = self.linear(x)
        return result


def train_with_one_that_dies(settings: dict[str, Any]) -> None:
    module = PipelineModule([LayerSpec(Dies)], nn.functional.mse_loss)
    config = {"data_parallel": 4, "ranks_per_node": 2, "micro_batches": 1, "partition": "uniform", **settings}
    engine = initialize(module, config=config, optimizer=torch.optim.SGD)
    for _ in range(3):
        engine.train_batch(iter([Item(torch.ones(2, 3), torch.zeros(2, 3))]))


@pytest.mark.parametrize("settings", [{**BY_NODES, "zero": 3}, {**BY_NODES, "comm_compress": "topk"}], ids=str)
def test_a_rank_that_dies_ends_the_others_soon(settings: dict[str, Any]) -> None:
    """Also those that wait in an exchange behind the computation, for which a wait may take 300 seconds."""
    endings = try_processes(train_with_one_that_dies, 4, settings, timeout=60.0)
    assert endings[2].exit_code == -signal.SIGKILL
    for ending in (*endings[:2], endings[3]):
        assert ending.exit_code == 1
        assert "RankDied" in (ending.error or "")
        assert ending.seconds < 30.0
    assert any("rank 2 has died" in (ending.error or "") for ending in endings)


@pytest.mark.cuda
def test_exchanges_on_a_stream_wait_for_what_is_queued_and_are_waited_for() -> None:
    device = torch.device("cuda", 0)
    aside = behind(device, threads=False)
    x = torch.zeros(1 << 24, device=device)
    for number in range(1, 20):
        x.fill_(number)  # queued on the current stream
        result = torch.empty_like(x)
        pending = aside.start(partial(torch.mul, x, 2, out=result))
        pending.wait()
        assert float((result - 2 * number).abs().max()) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("zero", [0, 3])
def test_training_by_nodes_on_an_accelerator(zero: int) -> None:
    case, layout = transformer_case(RECIPE, 4, optimizer=adamw), Layout("1f1b", 4, data_parallel=4)
    found = run(case, layout, zero=zero, device="cuda", ranks_per_node=2, **BY_NODES)
    agree(found, plainly(case, layout, found.before), str(layout), 1e-9)


# -- compression ---------------------------------------------------------------------------------------------


def members(count: int, worker: Any, *args: Any) -> list[Any]:
    return run_local(worker, count, *args, timeout=20.0)


def shapes_of(length: int) -> list[tuple[int, torch.Size]]:
    return [(0, torch.Size([length // 2, 2]))]


def conserved(make: Any, steps: int, rows: int, columns: int, seed: int) -> float:
    """How far what was summed, and what is left out, are together from the true sum, relative to it."""
    mesh = make_mesh(3)
    exchange: Exchange = mesh.replicas if mesh.data > 1 else mesh.world
    generator = torch.Generator().manual_seed(1000 * seed + mesh.rank)
    like = torch.zeros(rows * columns + 3, dtype=torch.float64)
    shapes = [(0, torch.Size([rows, columns])), (rows * columns, torch.Size([3]))]
    compressor = Compressor(make(shapes), like, exchange, AT_ONCE, feedback=True)
    true, summed = torch.zeros_like(like), torch.zeros_like(like)
    for _ in range(steps):
        gradient = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        exact = gradient.clone()
        exchange.all_reduce(exact)
        true += exact
        compressor.start(gradient).wait()
        summed += gradient
    rest = compressor.rest
    assert rest is not None
    left = rest.clone()
    exchange.all_reduce(left)
    return float((summed + left - true).abs().max() / true.abs().max())


def powersgd(rank: int, shapes: Any) -> Method:
    return PowerSGD(rank, shapes)


def topk(share: float, shapes: Any) -> Method:
    return TopK(share)


@settings(max_examples=25, deadline=None)
@given(
    make=st.one_of(
        st.integers(1, 4).map(lambda rank: partial(powersgd, rank)),
        st.floats(0.01, 1.0).map(lambda share: partial(topk, share)),
    ),
    steps=st.integers(1, 5),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_no_gradient_is_lost_by_compression(make: Any, steps: int, rows: int, columns: int, seed: int) -> None:
    assert max(members(3, conserved, make, steps, rows, columns, seed)) < 1e-12


def summed_once(make: Any, own: Sequence[Tensor]) -> Tensor:
    mesh = make_mesh(len(own))
    vector = own[mesh.rank].clone()
    shapes = [(0, torch.Size([6, 5]))]
    Compressor(make(shapes), vector, mesh.replicas, AT_ONCE, feedback=False).start(vector).wait()
    return vector


def test_powersgd_is_exact_where_the_sum_is_of_its_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (6, 5))
    own = [(left @ torch.diag(torch.tensor(d, dtype=torch.float64)) @ right.t()).reshape(-1) for d in ([1, 2], [3, -1])]
    for found in members(2, summed_once, partial(powersgd, 2), own):
        torch.testing.assert_close(found, own[0] + own[1], rtol=0, atol=1e-12)


def test_powersgd_comes_nearer_with_each_step_of_the_same_gradients() -> None:
    """Power iteration from the last step's factors; the best of rank 1 is known from the singular values."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(30, generator=generator, dtype=torch.float64)

    def distances() -> list[float]:
        mesh = make_mesh(1)
        compressor = Compressor(
            PowerSGD(1, [(0, torch.Size([6, 5]))]), gradient, mesh.world, AT_ONCE, feedback=False
        )
        found = []
        for _ in range(30):
            vector = gradient.clone()
            compressor.start(vector).wait()
            found.append(float((vector - gradient).norm()))
        return found

    found = run_local(distances, 1)[0]
    best = float(torch.linalg.svdvals(gradient.view(6, 5))[1:].norm())
    assert found[-1] == pytest.approx(best, rel=1e-6)
    assert all(after <= before + 1e-12 for before, after in pairwise(found))


def test_topk_sends_the_largest() -> None:
    own = [torch.arange(30.0), -torch.arange(30.0).flip(0)]
    for found in members(2, summed_once, partial(topk, 0.1), own):
        expected = torch.zeros(30)
        expected[27:] = torch.tensor([27.0, 28.0, 29.0])
        expected[:3] = torch.tensor([-29.0, -28.0, -27.0])
        assert torch.equal(found, expected)


def test_bf16_rounds_each_members_gradients_and_their_sum() -> None:
    own = [torch.full((30,), 1 + 2**-9), torch.full((30,), 2.0)]
    for found in members(2, summed_once, lambda shapes: Bf16(), own):
        assert torch.equal(found, torch.full((30,), 3.0))


@pytest.mark.parametrize("by_nodes", [False, True], ids=["flat", "by nodes"])
@pytest.mark.parametrize("compress", ["bf16", "powersgd", "topk"])
@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_train_on_the_same_compressed_sum(zero: int, compress: str, by_nodes: bool) -> None:
    case, layout = transformer_case(Recipe(), 4, optimizer=adamw), Layout("1f1b", 8, data_parallel=4)
    how = {**BY_NODES, "ranks_per_node": 4} if by_nodes else {"comm_gradients": "flat"}
    found = run(case, layout, zero=zero, comm_compress=compress, comm_rank=2, comm_share=0.2, **how)
    exact = plainly(case, layout, found.before)
    assert found.losses[0] == pytest.approx(exact.losses[0], rel=1e-5)  # of the weights as they were
    assert found.losses != exact.losses


def test_all_of_the_elements_are_an_exact_sum() -> None:
    case, layout = transformer_case(RECIPE, 4, optimizer=adamw), Layout("1f1b", 4, data_parallel=2)
    found = run(case, layout, comm_compress="topk", comm_share=1.0)
    agree(found, plainly(case, layout, found.before), str(layout), 1e-11)


def test_processes_train_on_compressed_sums() -> None:
    case, layout = transformer_case(Recipe(), 4, optimizer=adamw), Layout("1f1b", 4, data_parallel=2)
    results = everywhere(train_here, 4, case, layout, processes=True, comm_compress="powersgd", comm_rank=2)
    assert all(agrees for _, agrees in results)


# -- what is chosen, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("zero", [2, 3])
def test_compression_of_parts_is_refused(zero: int) -> None:
    with pytest.raises(ConfigError, match=r"works on whole gradients, .*set zero to 0 or 1"):
        PipelineConfig(zero=zero, comm_compress="powersgd")


def test_compression_under_a_dynamic_loss_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="set loss_scale to a number"):
        PipelineConfig(precision="fp16", comm_compress="topk")
    assert PipelineConfig(precision="fp16", loss_scale=128, comm_compress="topk").comm_compress == "topk"


def test_nodes_with_unequal_numbers_of_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="as many data-parallel ranks of a stage on each node, not 1 and 2"):
        run_local(ways_here, 3, 3, 2)


def test_where_nothing_can_be_split_the_way_is_flat() -> None:
    def flat(data: int, per_node: int) -> bool:
        mesh, ways = ways_here(data, per_node, comm_gradients="auto")
        return ways.gradients is mesh.replicas and not ways.reasons

    assert all(run_local(flat, 2, 2, 2))  # one node
    assert all(run_local(flat, 4, 2, 2))  # each replica on another


def test_auto_says_what_was_measured() -> None:
    def reasons() -> tuple[str, ...]:
        return ways_here(4, 2, comm_gradients="auto", comm_parameters="auto", comm_states="flat")[1].reasons

    results = run_local(reasons, 4)
    assert results == [results[0]] * 4
    gradients, parameters = results[0]
    assert gradients.startswith("gradients: ")
    assert parameters.startswith("parameters: ")
    assert "ms/MiB" in gradients


@pytest.mark.parametrize(("pipe", "data", "expected"), [(10.0, 20.0, "data"), (20.0, 10.0, "pipe")])
def test_what_sends_more_lies_inside(pipe: float, data: float, expected: str) -> None:
    def inside() -> tuple[str, str]:
        traffic = Traffic(pipe * 2**20, data * 2**20)
        mesh = make_mesh(2, inside="auto", traffic=lambda ranks: traffic, ranks_per_node=2)
        return mesh.inside, mesh.reason

    assert {found for found, _ in run_local(inside, 4)} == {expected}
    assert "MiB of gradients and parameters a step" in run_local(inside, 4)[0][1]


def test_a_profile_says_what_is_sent() -> None:
    def layers(parameters: int, output: int) -> tuple[LayerCost, ...]:
        cost = LayerCost(
            name="l", type="L", forward=1, input_grad=1, weight_grad=1, output_bytes=output, parameter_bytes=parameters
        )
        return (cost,) * 4

    def chosen(profile: Profile) -> str:
        module = PipelineModule([LayerSpec(nn.Linear, 2, 2) for _ in range(4)], nn.functional.mse_loss)
        config = {"data_parallel": 2, "ranks_per_node": 2, "micro_batches": 4}
        return initialize(module, config=config, optimizer=torch.optim.SGD, profile=profile).mesh.inside

    assert set(run_local(chosen, 4, Profile(layers=layers(1000, 10)))) == {"data"}
    assert set(run_local(chosen, 4, Profile(layers=layers(10, 1000)))) == {"pipe"}
