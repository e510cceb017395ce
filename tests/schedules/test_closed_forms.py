"""Bubbles of the papers' formulas, for costs that are not all the same, and the peaks of every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Costs, build, simulate

RANKS = st.integers(1, 8)
PAIRS = st.integers(1, 4).map(lambda half: 2 * half)
TIMES = st.sampled_from([(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0)])  # W <= F, I
HOPS = st.sampled_from([0.0, 0.1])


@given(RANKS, st.integers(1, 40), TIMES, HOPS)
def test_eager_1f1b(p: int, m: int, times: tuple[float, float, float], hop: float) -> None:
    timeline = simulate(build("1f1b-eager", ranks=p, micro_batches=m), Costs(*times, hop=hop))
    assert timeline.step_time == pytest.approx((m + p - 1) * sum(times) + 2 * (p - 1) * hop)
    assert timeline.peak_activations == tuple(min(2 * (p - 1 - rank) + 1, m) for rank in range(p))


@given(RANKS, st.integers(1, 4), st.integers(0, 24), TIMES, HOPS)
def test_breadth_first(p: int, v: int, more: int, times: tuple[float, float, float], hop: float) -> None:
    m = 2 * p + more
    schedule = build("breadth-first", ranks=p, micro_batches=m, stages_per_rank=v)
    timeline = simulate(schedule, Costs(*(time / v for time in times), hop=hop))
    assert timeline.step_time == pytest.approx(m * sum(times) + (p - 1) * (sum(times) / v + 2 * hop))
    assert timeline.peak_activations == pytest.approx([m] * p)


@given(RANKS, st.integers(1, 24), TIMES, HOPS)
def test_zb_h1(p: int, more: int, times: tuple[float, float, float], hop: float) -> None:
    (f, i, w), m = times, p + more
    timeline = simulate(build("zb-h1", ranks=p, micro_batches=m), Costs(f, i, w, hop=hop))
    assert timeline.step_time == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w + 4 * hop))
    assert timeline.peak_activations == (p,) * p


@given(RANKS, st.integers(0, 24), TIMES, HOPS)
def test_zb_h2(p: int, more: int, times: tuple[float, float, float], hop: float) -> None:
    (f, i, w), m = times, 2 * p - 1 + more
    timeline = simulate(build("zb-h2", ranks=p, micro_batches=m), Costs(f, i, w, hop=hop))
    work, idle = m * (f + i + w), max(0.0, (p - 1) * (f + i - 2 * w + 2 * hop))
    assert timeline.span_bubble == pytest.approx(idle / (work + idle))
    assert timeline.step_time >= work + (p - 1) * (f + hop) - 1e-9
    assert timeline.peak_activations == (2 * p - 1,) * p


@given(RANKS, st.integers(0, 24))
def test_zb_v(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    timeline = simulate(build("zb-v", ranks=p, micro_batches=m), Costs(0.5, 0.5, 0.5))
    assert timeline.span_bubble == pytest.approx(0)
    assert timeline.step_time == pytest.approx(3 * m + (p - 1) / 2)
    assert timeline.peak_activations == (p,) * p


@given(RANKS, st.integers(1, 4), st.integers(2, 5), TIMES, HOPS)
def test_interleaved_zb(p: int, v: int, turns: int, times: tuple[float, float, float], hop: float) -> None:
    (f, i, w), m = times, p * turns
    hop = min(hop, w / v / 2)
    schedule = build("interleaved-zb", ranks=p, micro_batches=m, stages_per_rank=v)
    timeline = simulate(schedule, Costs(f / v, i / v, w / v, hop=hop))
    ways = 4 * (p - 1) + (v - 1) * p if p > 1 else 0
    assert timeline.step_time == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w) / v + ways * hop)
    assert timeline.peak_activations == pytest.approx([p] * p)


@given(RANKS, st.integers(1, 40))
def test_interleaved_zb_with_one_stage_a_rank_is_zb_h1(p: int, m: int) -> None:
    interleaved = build("interleaved-zb", ranks=p, micro_batches=m, stages_per_rank=1)
    assert interleaved.rows == build("zb-h1", ranks=p, micro_batches=m).rows


@given(PAIRS, st.integers(0, 12), st.sampled_from([(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.0, 1.0)]), st.booleans())
def test_dualpipe(p: int, more: int, times: tuple[float, float, float], overlapped: bool) -> None:
    (f, i, w), m = times, 2 * (p + more)
    for name, share, idle in (("dualpipe", 1.0, p / 2 - 1), ("dualpipe-v", 0.5, (p - 1) / 2)):
        schedule = build(name, ranks=p, micro_batches=m, overlapped=overlapped)
        timeline = simulate(schedule, Costs(f * share, i * share, w * share))
        assert timeline.step_time == pytest.approx(m * (f + i + w) + idle * (f * (1 + overlapped) + i - w))
        assert timeline.peak_activations == pytest.approx([p + share] * p)


@given(PAIRS, st.integers(1, 5))
def test_chimera_with_equal_passes(p: int, turns: int) -> None:
    timeline = simulate(build("chimera", ranks=p, micro_batches=turns * p), Costs(1.0, 0.5, 0.5))
    assert timeline.step_time == 2 * turns * p + p - 2
    outer = [min(rank, p - 1 - rank) for rank in range(p)]
    assert timeline.peak_activations == tuple(p // 2 + 1 + rank for rank in outer)


@given(RANKS, st.integers(1, 4), st.integers(1, 5))
def test_hanayo_with_equal_passes(p: int, v: int, turns: int) -> None:
    schedule = build("hanayo", ranks=p, micro_batches=turns * p, stages_per_rank=v)
    timeline = simulate(schedule, Costs(1 / v, 0.5 / v, 0.5 / v))
    assert timeline.step_time == pytest.approx(2 * turns * p + 2 * (p - 1) / v)
    assert max(timeline.peak_activations) == pytest.approx(p)


@given(st.sampled_from([4, 6, 8, 10]), st.integers(0, 12))
@settings(max_examples=12)
def test_v_half_reaches_the_bound_for_its_memory(p: int, more: int) -> None:
    """At most k activations of a stage: 6m + 6p - 1 - 3k passes (Qi et al., arXiv 2405.15362), here k = p + 2."""
    m = 2 * p + more
    timeline = simulate(build("v-half", ranks=p, micro_batches=m), Costs(0.5, 0.5, 0.5))
    assert timeline.step_time == pytest.approx(3 * m + (3 * p - 7) / 2)
    assert timeline.peak_activations == (p / 2 + 1,) * p
