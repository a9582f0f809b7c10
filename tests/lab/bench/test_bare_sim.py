"""The bare loop jumps, and yet gives the times of a loop that runs every step over every sequence."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench.bare_sim import BareCost, run


@dataclass
class Seat:
    request: int
    kv_tokens: int
    left: int


def run_step_by_step(arrived_ps: list[int], prompts: list[int], outputs: list[int], cost: BareCost):
    """The same rules, in the most obvious way."""
    first_token_ps, finished_ps = [0] * len(prompts), [0] * len(prompts)
    now_ps, coming = 0, 0
    running: list[Seat] = []
    while running or coming < len(prompts):
        if not running:
            now_ps = max(now_ps, arrived_ps[coming])
        entering = []
        while coming < len(prompts) and arrived_ps[coming] <= now_ps:
            entering.append(coming)
            coming += 1
        if entering:
            now_ps += cost.prefill_ps + cost.prompt_token_ps * sum(prompts[request] for request in entering)
            for request in entering:
                first_token_ps[request] = finished_ps[request] = now_ps
                running.append(Seat(request, prompts[request], outputs[request] - 1))
        else:
            kv_tokens = sum(seat.kv_tokens for seat in running)
            now_ps += cost.decode_ps + cost.sequence_ps * len(running) + cost.kv_token_ps * kv_tokens
            for seat in running:
                seat.kv_tokens += 1
                seat.left -= 1
                finished_ps[seat.request] = now_ps
        running = [seat for seat in running if seat.left]
    return first_token_ps, finished_ps


COSTS = (
    BareCost(700, 3, 1000, 10, 1),
    BareCost(7_000_000_000, 30_000_000, 9_000_000_000, 40_000_000, 60_000),
    BareCost(0, 0, 1, 0, 0),
)


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3000) | st.just(0), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25
    ),
    scale=st.sampled_from([0, 1, 5, 10**7]),
    cost=st.sampled_from(COSTS),
)
def test_jumping_gives_the_times_of_stepping(requests: list[tuple[int, int, int]], scale: int, cost: BareCost):
    arrived_ps = [int(at) * scale for at in np.cumsum([gap for gap, _, _ in requests])]
    prompts, outputs = [prompt for _, prompt, _ in requests], [output for _, _, output in requests]
    times = run(arrived_ps, prompts, outputs, cost)
    assert (times.first_token_ps, times.finished_ps) == run_step_by_step(arrived_ps, prompts, outputs, cost)


@pytest.mark.parametrize("cost", COSTS[:2])
def test_a_long_run_does_too(cost: BareCost):
    rng = np.random.default_rng(1)
    arrived_ps = np.cumsum(rng.integers(0, 60 * cost.decode_ps, 300)).tolist()
    prompts, outputs = rng.integers(8, 513, (2, 300)).tolist()
    times = run(arrived_ps, prompts, outputs, cost)
    assert (times.first_token_ps, times.finished_ps) == run_step_by_step(arrived_ps, prompts, outputs, cost)


def test_an_arrival_at_a_boundary_is_seen_there():
    cost = BareCost(100, 0, 10, 0, 0)
    times = run([0, 110], [1, 1], [5, 5], cost)
    assert times.first_token_ps == [100, 210]
    assert run([0, 111], [1, 1], [5, 5], cost).first_token_ps == [100, 220]


def test_nothing_takes_no_time():
    assert run([], [], [], COSTS[0]).finished_ps == []
